// Corrections of one answer: what a person decided of its landmarks, with undo and redo.

import { invert, transform } from "./geometry.js";

// What only the network knows of a landmark, and not of one that a person places.
const UNKNOWN = {
  confidence: null, mass: null, coherence: null, spread_mm: null, region95_mm: null, disagreement_mm: null,
  expected_ras_mm: null, candidates: null,
};
// Rank in the order of review.
const DOUBTS = { not_found: 0, out_of_field: 0, low_confidence: 1, detected: 2 };

const byPerson = ({ decided_by }) => decided_by === "person";

/** In a word, what a person decided; null: the network decided. As the files of app.io.slicer say it. */
export function decision(landmark) {
  if (!byPerson(landmark)) return null;
  if (!landmark.ijk) return "absent";
  return landmark.confidence === null ? "placed" : "accepted";
}

/** How many have a position that the service itself doubts. */
export const countDoubtful = (landmarks) => landmarks.filter(({ status }) => status === "low_confidence").length;

/** The landmark that is nearest to the middle of all, where there is most to see; -1 if none was found. */
export function nearestToAll(landmarks) {
  const found = landmarks.filter(({ ijk }) => ijk);
  const middle = [0, 1, 2].map((axis) => found.reduce((sum, { ras_mm }) => sum + ras_mm[axis], 0) / found.length);
  const distance = ({ ras_mm }) => Math.hypot(...ras_mm.map((mm, axis) => mm - middle[axis]));
  const [first] = found.sort((one, other) => distance(one) - distance(other));
  return landmarks.indexOf(first);
}

export class Edits {
  #past = [];
  #future = [];
  #order;

  /** `original` is an answer of the service, which stays as it is. */
  constructor(original) {
    this.original = original;
    this.landmarks = original.landmarks;
    const doubt = ({ status, confidence }) => DOUBTS[status] + (confidence ?? 0) / 2;
    const doubts = original.landmarks.map(doubt);
    this.#order = [...doubts.keys()].sort((one, other) => doubts[one] - doubts[other]);
  }

  /** The answer as corrected; its measurements are still those of the original. */
  get answer() {
    return { ...this.original, landmarks: this.landmarks };
  }

  /** Number of landmarks that a person decided. */
  get decided() {
    return this.landmarks.filter(byPerson).length;
  }

  get canUndo() {
    return this.#past.length > 0;
  }

  get canRedo() {
    return this.#future.length > 0;
  }

  // Each of the following returns the index of the landmark that it changed, or -1.

  /**
   * Put a landmark at a position in mm, RAS, or, if that is outside of the scan, at its edge; `on`: as one step with the
   * one before, such as of a key held down.
   */
  place(index, position, { on = false } = {}) {
    const { affine, shape } = this.original.volume;
    // Up to the faces of the outermost voxels, as the service takes it.
    const inside = (at, axis) => Math.min(Math.max(at, -0.5), shape[axis] - 0.5);
    const ijk = transform(invert(affine), position).map(inside);
    const ras = transform(affine, ijk);
    const lps = [-ras[0], -ras[1], ras[2]].map((mm) => mm + 0); // no -0
    return this.#change(index, { ...UNKNOWN, status: "detected", ijk, ras_mm: ras, lps_mm: lps }, on);
  }

  /** Say that a landmark is where the network found it, or that it is absent as the network says. */
  accept(index) {
    const landmark = this.landmarks[index];
    if (byPerson(landmark)) return -1;
    return this.#change(index, { status: landmark.ijk ? "detected" : landmark.status });
  }

  /** Say that a landmark is not in the scan. */
  remove(index) {
    if (decision(this.landmarks[index]) === "absent") return -1;
    return this.#change(index, { ...UNKNOWN, status: "not_found", ijk: null, ras_mm: null, lps_mm: null });
  }

  /** Undo the last step. */
  undo() {
    return this.#step(this.#past, this.#future, "before");
  }

  /** Redo what was undone last. */
  redo() {
    return this.#step(this.#future, this.#past, "after");
  }

  /**
   * The next landmark to review after one; -1 if a person has decided all. Those that were not found come first,
   * then those of low confidence, then the others, the least confident first.
   */
  nextDoubtful(after) {
    const start = this.#order.indexOf(after) + 1;
    const ahead = [...this.#order.slice(start), ...this.#order.slice(0, start)];
    return ahead.find((index) => !byPerson(this.landmarks[index])) ?? -1;
  }

  #change(index, change, on = false) {
    const before = this.landmarks[index];
    const after = { ...before, ...change, decided_by: "person" };
    const last = this.#past.at(-1);
    if (on && last?.index === index && last.after === before) last.after = after;
    else this.#past.push({ index, before, after });
    this.#future = [];
    return this.#set(index, after);
  }

  #step(from, to, side) {
    const step = from.pop();
    if (!step) return -1;
    to.push(step);
    return this.#set(step.index, step[side]);
  }

  #set(index, landmark) {
    this.landmarks = this.landmarks.with(index, landmark);
    return index;
  }
}
