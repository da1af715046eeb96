// The downloads: an answer in every format, and the landmarks and the measurements of all scans as one table each.

import { element } from "./element.js";
import { titleOf } from "./queue.js";
import { convertAnswer } from "./service.js";

// The first ones are buttons, the others in a menu.
const FORMATS = {
  "json": "JSON (RAS and LPS)",
  "mrk.json": "Slicer .mrk.json (LPS)",
  "csv": "CSV (LPS)",
  "tsv": "TSV (LPS)",
  "fcsv": "Slicer .fcsv (LPS)",
  "long": "CSV, all columns (RAS and LPS)",
  "measurements": "Measurements, CSV",
};
const BUTTONS = 2;
const TABLES = ["long", "measurements"];
// Those of the formats of one scan, which stand between the scan and the model, as in the tables of `landmarkd detect`.
const COLUMNS = {
  landmarks: [
    "label", "status", "confidence", "l", "p", "s", "ras_x_mm", "ras_y_mm", "ras_z_mm", "i", "j", "k",
    "spread_mm", "region95_mm", "decided_by", "description", "warnings",
  ],
  measurements: ["name", "value", "unit", "low95", "high95", "reason", "description", "warnings"],
};
const NOWHERE = [null, null, null];
const CELLS = {
  landmarks: (one) => [
    one.name, one.status, one.confidence, ...(one.lps_mm ?? NOWHERE), ...(one.ras_mm ?? NOWHERE), ...(one.ijk ?? NOWHERE),
    one.spread_mm, one.region95_mm, one.decided_by,
  ],
  measurements: (one) => [one.name, one.value, one.unit, ...(one.interval95 ?? [null, null]), one.reason],
};

/** The title of a scan without what says its format. */
const stemOf = (title) => title.replace(/\.(nii(\.gz)?|gz|nrrd|mha|zip|dcm)(?=$| (frame|series) \d+$)/i, "");

/** Offer an answer with its corrections as they are when a button is pressed; `onProblem` gets null at first. */
export function offerDownloads(title, edits, onProblem) {
  const names = Object.keys(FORMATS).filter((name) => name !== "measurements" || edits.original.measurements.length);
  const buttons = names.map((name) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: FORMATS[name] });
    button.dataset.format = name;
    button.onclick = async () => {
      const { answer, landmarks } = edits;
      onProblem(null);
      try {
        const suffix = TABLES.includes(name) ? `${name}.csv` : name;
        save(await convertAnswer(answer, name), `${stemOf(title)}.${suffix}`);
        if (name !== "measurements") edits.saved = landmarks; // that table holds no positions
      } catch (problem) {
        onProblem(problem);
      }
    };
    return button;
  });
  element("downloads").replaceChildren(...buttons.slice(0, BUTTONS));
  element("formats").replaceChildren(...buttons.slice(BUTTONS));
}

/** Save the landmarks of those scans of the list that have an answer as one table. */
export function saveLandmarks(entries) {
  saveTable("landmarks", namesOf(entries), entries.map(({ edits }) => edits?.answer));
}

/** Save their measurements, which the service computes of corrected landmarks. */
export async function saveMeasurements(entries) {
  const given = entries.map(({ edits }) => edits); // the list may change meanwhile
  const names = namesOf(entries);
  const answers = [];
  // One by one: a service does not take any number of requests at once.
  for (const edits of given) answers.push(edits?.decided ? await convertAnswer(edits.answer, "json", "json") : edits?.original);
  saveTable("measurements", names, answers);
}

const namesOf = (entries) => apart(entries.map(({ name, choice }) => stemOf(titleOf(name, choice))));

function saveTable(what, names, answers) {
  const rows = answers.flatMap((answer, at) => {
    const ends = answer && [answer.warnings.join(" | "), answer.model.name, answer.model.version];
    return (answer?.[what] ?? []).map((one) => [names[at], ...CELLS[what](one), one.description, ...ends]);
  });
  const text = [["scan", ...COLUMNS[what], "model", "version"], ...rows].map((row) => `${row.map(cell).join(",")}\n`).join("");
  const models = new Set(answers.flatMap((answer) => answer?.model.name ?? []));
  save(new Blob([text], { type: "text/csv" }), `${[...models].join("-")}-${what}.csv`);
}

/** Each name once: scans that were dropped without their folders may share one. */
function apart(names) {
  const taken = new Set();
  for (const name of names) {
    let own = name;
    for (let number = 2; taken.has(own); number++) own = `${name} (${number})`;
    taken.add(own);
  }
  return [...taken];
}

function cell(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
