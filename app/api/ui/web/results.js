// The table of landmarks, and what is measured between them.

import { countDoubtful, decision } from "./edits.js";
import { element, reveal } from "./element.js";
import { digitsOf } from "./geometry.js";
import { remember, remembered } from "./memory.js";

const STATUSES = {
  detected: "detected",
  low_confidence: "low confidence",
  not_found: "not found",
  out_of_field: "out of field",
};
const WHY_NOWHERE = { not_found: "was not found in this scan", out_of_field: "is outside this scan" };
const AXES = {
  RAS: [["R", "right"], ["A", "anterior"], ["S", "superior"]],
  LPS: [["L", "left"], ["P", "posterior"], ["S", "superior"]],
};
const FRAME_KEY = "landmarkd.frame";
const OTHER_MODEL = "If it shows something else, choose another model at the top of the page.";
const UNITS = { mm: " mm", deg: "°", "": "" };

const shown = (number, digits) => (number === null ? "–" : number.toFixed(digits));
/** The index of the row at which something happens; -1: none. */
const indexAt = ({ target }) => target.closest("tr")?.sectionRowIndex ?? -1;

/** The table of landmarks; `onSelect` and `onHover` get the index of a row. */
export class Results {
  #frame = remembered(FRAME_KEY) in AXES ? remembered(FRAME_KEY) : "RAS";
  #selected = -1;
  #before = -1; // the one selected before it
  #digits = 2; // of lengths in mm

  constructor({ onSelect, onHover }) {
    Object.assign(this, { onSelect, onHover, landmarks: [] });
    const rows = element("rows");
    rows.addEventListener("click", (event) => indexAt(event) >= 0 && onSelect(indexAt(event)));
    rows.addEventListener("keydown", (event) => this.#move(event));
    rows.addEventListener("pointerover", (event) => onHover(indexAt(event)));
    rows.addEventListener("pointerleave", () => onHover(-1));
    element("to-rows").onclick = () => rows.querySelector('[tabindex="0"]').focus();
    element("frames").onclick = ({ target }) => target.dataset.frame && this.#showFrame(target.dataset.frame, true);
    this.#showFrame(this.#frame, false);
    new ResizeObserver(() => this.#reveal()).observe(element("scroll"));
  }

  /** Show the answer for a scan. */
  show(answer, title) {
    this.landmarks = [];
    this.#selected = this.#before = -1;
    this.#digits = digitsOf(answer.volume);
    element("facts").textContent =
      `${title} · ${answer.volume.shape.join(" × ")} voxels · ${answer.model.name} ` +
      `${answer.model.version} · ${(answer.timing_ms.total / 1000).toFixed(2)} s`;
    element("rows").replaceChildren();
    element("chosen").textContent = "";
    this.update(answer.landmarks);
    element("told").textContent = `${title}: ${element("summary").textContent}`;
    this.measured(answer);
    element("results").hidden = false;
  }

  /** Show how its landmarks have changed. */
  update(landmarks) {
    const before = this.landmarks;
    element("told").textContent = ""; // no longer so
    this.landmarks = landmarks;
    const found = landmarks.filter((landmark) => landmark.ras_mm).length;
    const doubtful = countDoubtful(landmarks);
    element("summary").textContent =
      `${found} of ${landmarks.length} landmarks found${doubtful ? `, ${doubtful} of them doubtful` : ""}`;
    landmarks.forEach((landmark, index) => landmark !== before[index] && this.#showRow(landmark, index));
    this.#mark();
  }

  /** Show the measurements and warnings of an answer; null: they are being computed. */
  measured(answer) {
    element("measurements").setAttribute("aria-busy", answer === null);
    if (!answer) return;
    const isElsewhere = element("model").length > 1 && !answer.landmarks.some(({ ijk }) => ijk);
    const warnings = isElsewhere ? [...answer.warnings, OTHER_MODEL] : answer.warnings;
    element("warnings").replaceChildren(...warnings.map((text) => create("li", text)));
    element("measurements").replaceChildren(...answer.measurements.map((one) => measurementRow(one, this.#digits)));
    element("measured").hidden = !answer.measurements.length;
  }

  hide() {
    element("results").hidden = true;
    element("told").textContent = "";
    this.landmarks = [];
  }

  /** Select a row; -1: none. */
  select(index, { focus = false } = {}) {
    if (index !== this.#selected) this.#before = this.#selected;
    this.#selected = index;
    this.#mark();
    // In the table, the focus goes along: arrows go on from the row that has it.
    if (focus || element("rows").contains(document.activeElement)) element("rows").rows[index]?.focus();
    this.#reveal();
  }

  /** Scroll the selected row into sight. */
  #reveal() {
    const row = element("rows").rows[this.#selected];
    if (row) reveal(element("scroll"), row, row.offsetHeight);
  }

  /** Highlight the row of the point under the pointer; -1: none. */
  hover(index) {
    [...element("rows").rows].forEach((row, at) => row.classList.toggle("near", at === index));
  }

  #showFrame(frame, isChosen) {
    this.#frame = frame;
    remember(FRAME_KEY, frame, isChosen);
    for (const button of element("frames").children) {
      button.setAttribute("aria-pressed", button.dataset.frame === frame);
    }
    AXES[frame].forEach(([letter, word], axis) => {
      const head = element(`axis-${axis}`);
      Object.assign(head, { textContent: letter, title: `${word}, mm` });
    });
    this.landmarks.forEach((landmark, index) => this.#showRow(landmark, index));
    this.#mark();
  }

  #showRow(landmark, index) {
    const rows = element("rows");
    const row = rowOf(landmark, this.#frame, this.#digits);
    const old = rows.rows[index];
    if (!old) return rows.append(row);
    // The row stays, with the focus that it may have.
    old.replaceChildren(...row.children);
    Object.assign(old.dataset, row.dataset);
  }

  #mark() {
    [...element("rows").rows].forEach((row, at) => {
      row.setAttribute("aria-selected", at === this.#selected);
      row.tabIndex = at === Math.max(this.#selected, 0) ? 0 : -1;
    });
    const landmark = this.landmarks[this.#selected];
    if (landmark) describe(landmark, this.landmarks[this.#before], this.#digits);
  }

  #move(event) {
    const at = indexAt(event);
    const last = this.landmarks.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last, Enter: at, " ": at }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.onSelect(Math.min(Math.max(to, 0), last));
  }
}

function create(tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

function rowOf(landmark, frame, digits) {
  const row = document.createElement("tr");
  row.dataset.by = landmark.decided_by;
  row.dataset.status = decision(landmark) && landmark.ijk ? "person" : landmark.status;
  const name = create("td", landmark.name);
  name.title = landmark.description || landmark.name;
  const status = create("td", "");
  const [label, dot] = [create("span", ""), create("span", "")];
  [label.className, dot.className] = ["status", "dot"];
  label.append(dot, decision(landmark) ?? STATUSES[landmark.status]);
  status.append(label);
  if (decision(landmark)) status.title = "Decided by you";
  const numbers = [
    ...((frame === "RAS" ? landmark.ras_mm : landmark.lps_mm) ?? [null, null, null]).map((mm) => shown(mm, digits)),
    shown(landmark.confidence, 2),
    shown(landmark.region95_mm, digits),
  ].map((text) => {
    const cell = create("td", text);
    cell.className = "number";
    return cell;
  });
  row.append(name, status, ...numbers);
  return row;
}

function measurementRow({ name, description, unit, value, interval95, reason }, digitsOfMm) {
  const row = document.createElement("tr");
  const digits = { mm: digitsOfMm - 1, deg: 1, "": 3 }[unit];
  const interval = interval95 ? interval95.map((bound) => bound.toFixed(digits)).join(" – ") : reason || "–";
  const cells = [name, value === null ? "–" : value.toFixed(digits) + UNITS[unit], interval];
  row.append(...cells.map((text) => create("td", text)));
  row.title = description || name;
  return row;
}

/** Say in words what is known of the chosen landmark, and how far it is from the one before. */
function describe(landmark, before, digits) {
  const { name, description, status, ijk, ras_mm: here } = landmark;
  const nowhere = decision(landmark) ? "" : `It ${WHY_NOWHERE[status]}.`; // the network may have found it
  const where = ijk ? `Voxel ${ijk.map((at) => at.toFixed(1)).join(", ")}.` : nowhere;
  const who = { placed: "Placed by you.", accepted: "Accepted by you.", absent: "Marked absent by you." };
  const there = before?.ras_mm;
  const apart = here && there && Math.hypot(...here.map((mm, axis) => mm - there[axis]));
  const ruler = apart ? `${apart.toFixed(digits)} mm from ${before.name}, chosen before.` : "";
  const words = [where, ruler, who[decision(landmark)]].filter(Boolean).join(" ");
  const title = create("strong", description ? `${name}: ${description}.` : `${name}.`);
  element("chosen").replaceChildren(title, ` ${words}`);
}
