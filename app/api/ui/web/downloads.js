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
  "wide": "Measurements in one row, CSV",
};
const BUTTONS = 2;
const MEASURED = ["measurements", "wide"]; // without positions
const TABLES = ["long", ...MEASURED];
// As in the table of all scans of `landmarkd detect`, between the scan, and the warnings and the model.
const COLUMNS = [
  "label", "status", "confidence", "l", "p", "s", "ras_x_mm", "ras_y_mm", "ras_z_mm", "i", "j", "k",
  "spread_mm", "region95_mm", "decided_by", "description",
];
const NOWHERE = [null, null, null];
const cellsOf = (one) => [
  one.name, one.status, one.confidence, ...(one.lps_mm ?? NOWHERE), ...(one.ras_mm ?? NOWHERE), ...(one.ijk ?? NOWHERE),
  one.spread_mm, one.region95_mm, one.decided_by, one.description,
];

/** The title of a scan without what says its format. */
const stemOf = (title) => title.replace(/\.(nii(\.gz)?|gz|hdr|nrrd|nhdr|mha|mhd|mg[hz]|zip|dcm)(?=$| (frame|series) \d+$)/i, "");

/** Offer an answer with its corrections as they are when a button is pressed; `onProblem` gets null at first. */
export function offerDownloads(title, edits, onProblem) {
  const names = Object.keys(FORMATS).filter((name) => !MEASURED.includes(name) || edits.original.measurements.length);
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
        if (!MEASURED.includes(name)) edits.saved = landmarks;
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
  const answers = entries.map(({ edits }) => edits?.answer);
  saveTable("landmarks", namesOf(entries), answers, COLUMNS, ({ landmarks }) => landmarks.map(cellsOf));
}

/**
 * Save their measurements, which the service computes of corrected landmarks, with one row for each scan, as in the
 * format `wide` of `landmarkd detect`.
 */
export async function saveMeasurements(entries) {
  const given = entries.map(({ edits }) => edits); // the list may change meanwhile
  const names = namesOf(entries);
  const answers = [];
  // One by one: a service does not take any number of requests at once.
  for (const edits of given) answers.push(edits?.decided ? await convertAnswer(edits.answer, "json", "json") : edits?.original);
  const columnOf = ({ name, unit }) => (unit ? `${name}_${unit}` : name);
  const measured = [...new Set(answers.flatMap((answer) => answer?.measurements.map(columnOf) ?? []))];
  const columns = [...measured, ...measured.flatMap((name) => [`${name}_low95`, `${name}_high95`]), "reasons"];
  saveTable("measurements", names, answers, columns, ({ measurements }) => {
    const found = new Map(measurements.map((one) => [columnOf(one), one]));
    const bounds = measured.flatMap((name) => found.get(name)?.interval95 ?? [null, null]);
    const reasons = measurements.filter(({ reason }) => reason).map(({ name, reason }) => `${name}: ${reason}`);
    return [[...measured.map((name) => found.get(name)?.value), ...bounds, reasons.join(" | ")]];
  });
}

const namesOf = (entries) => apart(entries.map(({ name, choice }) => stemOf(titleOf(name, choice))));

/** Save a table of answers, some of which may be missing; `rowsOf` gives the rows of one, of so many columns. */
function saveTable(what, names, answers, columns, rowsOf) {
  const rows = answers.flatMap((answer, at) => {
    const ends = answer && [answer.warnings.join(" | "), answer.model.name, answer.model.version];
    return (answer ? rowsOf(answer) : []).map((row) => [names[at], ...row, ...ends]);
  });
  const text = [["scan", ...columns, "warnings", "model", "version"], ...rows].map((row) => `${row.map(cell).join(",")}\n`).join("");
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
