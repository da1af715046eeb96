// The table of landmarks, and the downloads of an answer.

import { convertAnswer } from "./service.js";

const STATUSES = {
  detected: "detected",
  low_confidence: "low confidence",
  not_found: "not found",
  out_of_field: "out of field",
};
const FORMATS = {
  "json": "JSON",
  "mrk.json": "Slicer .mrk.json",
  "fcsv": "Slicer .fcsv",
  "csv": "CSV",
  "tsv": "TSV",
  "long": "CSV, all columns",
  "measurements": "Measurements, CSV",
};

const TABLES = ["long", "measurements"];
const UNITS = { mm: " mm", deg: "°", "": "" };

const element = (id) => document.getElementById(id);
const shown = (number, digits) => (number === null ? "–" : number.toFixed(digits));

/** The table of landmarks; `onSelect` and `onHover` get the index of a row. */
export class Results {
  constructor({ onSelect, onHover, onProblem }) {
    Object.assign(this, { onSelect, onHover, onProblem, landmarks: [] });
    const rows = element("rows");
    rows.addEventListener("click", (event) => this.#choose(event.target.closest("tr")));
    rows.addEventListener("keydown", (event) => this.#move(event));
    rows.addEventListener("pointerover", (event) => onHover(this.#indexOf(event.target.closest("tr"))));
    rows.addEventListener("pointerleave", () => onHover(-1));
  }

  show(answer, fileName) {
    this.landmarks = answer.landmarks;
    const found = answer.landmarks.filter((landmark) => landmark.ras_mm).length;
    element("summary").textContent = `${found} of ${answer.landmarks.length} landmarks found`;
    element("facts").textContent =
      `${fileName} · ${answer.volume.shape.join(" × ")} voxels · ${answer.model.name} ` +
      `${answer.model.version} · ${(answer.timing_ms.total / 1000).toFixed(2)} s · mm, RAS`;
    element("warnings").replaceChildren(...answer.warnings.map((text) => create("li", text)));
    element("rows").replaceChildren(...answer.landmarks.map(rowOf));
    element("measurements").replaceChildren(...answer.measurements.map(measurementRow));
    element("measured").hidden = !answer.measurements.length;
    const formats = Object.entries(FORMATS).filter(
      ([format]) => format !== "measurements" || answer.measurements.length,
    );
    const buttons = formats.map(([format, label]) => {
      const button = create("button", label);
      button.type = "button";
      button.dataset.format = format;
      button.onclick = () => this.#download(answer, format, fileName);
      return button;
    });
    element("downloads").replaceChildren(...buttons);
    element("chosen").textContent = "";
    element("results").hidden = false;
  }

  hide() {
    element("results").hidden = true;
    this.landmarks = [];
  }

  /** Select a row; -1: none. */
  select(index, { focus = false } = {}) {
    const rows = [...element("rows").rows];
    rows.forEach((row, at) => {
      row.setAttribute("aria-selected", at === index);
      row.tabIndex = at === Math.max(index, 0) ? 0 : -1;
    });
    if (index < 0) return;
    if (focus) rows[index].focus();
    rows[index].scrollIntoView({ block: "nearest" });
    element("chosen").textContent = describe(this.landmarks[index]);
  }

  /** Highlight the row of the point under the pointer; -1: none. */
  hover(index) {
    [...element("rows").rows].forEach((row, at) => row.classList.toggle("near", at === index));
  }

  #indexOf(row) {
    return row ? row.sectionRowIndex : -1;
  }

  #choose(row) {
    if (row) this.onSelect(this.#indexOf(row));
  }

  #move(event) {
    const at = this.#indexOf(event.target.closest("tr"));
    const last = this.landmarks.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, Enter: at, " ": at }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.onSelect(Math.min(Math.max(to, 0), last));
  }

  async #download(answer, format, fileName) {
    try {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await convertAnswer(answer, format));
      const suffix = TABLES.includes(format) ? `${format}.csv` : format;
      link.download = `${fileName.replace(/\.(nii(\.gz)?|gz|nrrd|mha|zip|dcm)$/i, "")}.${suffix}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (problem) {
      this.onProblem(problem);
    }
  }
}

function create(tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

function rowOf(landmark, index) {
  const row = document.createElement("tr");
  row.dataset.status = landmark.status;
  row.tabIndex = index === 0 ? 0 : -1;
  const name = create("td", landmark.name);
  name.title = landmark.description || landmark.name;
  const status = create("td", "");
  const [dot, word] = [create("span", ""), create("span", STATUSES[landmark.status])];
  dot.className = "dot";
  word.className = "word";
  status.append(dot, word);
  const numbers = [
    ...(landmark.ras_mm ?? [null, null, null]).map((mm) => shown(mm, 2)),
    shown(landmark.confidence, 2),
    shown(landmark.region95_mm, 2),
  ].map((text) => {
    const cell = create("td", text);
    cell.className = "number";
    return cell;
  });
  row.append(name, status, ...numbers);
  return row;
}

function measurementRow({ name, description, unit, value, interval95, reason }) {
  const row = document.createElement("tr");
  const interval = interval95 ? interval95.map((bound) => bound.toFixed(1)).join(" – ") : "–";
  const cells = [name, value === null ? "–" : value.toFixed(unit ? 1 : 3) + UNITS[unit], interval];
  row.append(...cells.map((text) => create("td", text)));
  row.title = reason || description || name;
  return row;
}

function describe(landmark) {
  const about = landmark.description ? `${landmark.name}: ${landmark.description}.` : `${landmark.name}.`;
  if (!landmark.ijk) {
    const why = { not_found: "is not in this scan", out_of_field: "is outside this scan" };
    return `${about} It ${why[landmark.status]}.`;
  }
  return `${about} Voxel ${landmark.ijk.map((at) => at.toFixed(1)).join(", ")}.`;
}
