// The scans of this page: a list of what was opened, each with its answer and corrections.

import { countDoubtful } from "./edits.js";
import { element, reveal } from "./element.js";
import { nameOf } from "./files.js";
import { nameOfProblem } from "./notices.js";

const WORDS = { waiting: "waiting", working: "working…", cancelled: "cancelled", problem: "problem" };

const UNANSWERED = { state: "waiting", edits: null, problem: null, abort: null, progress: null, selected: null, reviewed: false };

/** A scan's name with the frame or series of its file that was chosen. */
export const titleOf = (name, choice) => [name, ...Object.entries(choice).flat()].join(" ");

/**
 * An entry is {file, name, model, choice, kept, state, edits, problem, abort, progress, selected, reviewed}; a file is
 * only referred to, and read again whenever it is shown, and `kept` has what models have answered, by their names.
 * `onShow` gets the entry to look at.
 */
export class Queue {
  current = null;
  entries = [];

  constructor(onShow) {
    this.onShow = onShow;
    element("scans").onclick = ({ target }) => this.#turn([...element("scans").children].indexOf(target.closest("li")));
    element("before").onclick = () => this.#turn(this.#at - 1);
    element("after").onclick = () => this.#turn(this.#at + 1);
    element("scans").onkeydown = (event) => {
      const last = this.entries.length - 1;
      const to = { ArrowDown: this.#at + 1, ArrowUp: this.#at - 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.#turn(to);
      element("scans").children[this.#at].focus();
    };
  }

  /** The position of the scan that is looked at. */
  get #at() {
    return this.entries.indexOf(this.current);
  }

  /** Those that have an answer. */
  get answered() {
    return this.entries.filter(({ edits }) => edits);
  }

  /** Whether a person's corrections of any model's answer are nowhere but here. */
  get isUnsaved() {
    const answers = this.entries.flatMap(({ edits, kept }) => [{ edits }, ...Object.values(kept)]);
    return answers.some(({ edits }) => edits?.decided && edits.saved !== edits.landmarks);
  }

  /** Append files, or the frames or series of them that are chosen, to be answered by a model; return the first one's entry. */
  add(files, model, choice) {
    const added = files.map((file) => ({ file, name: nameOf(file), model, choice: { ...choice }, kept: {}, ...UNANSWERED }));
    this.entries.push(...added);
    this.render();
    return added[0];
  }

  /** Ask for the answers of some again, but not another model for one that it has given, which may be corrected. */
  again(entries, changes = {}) {
    for (const entry of entries) {
      const { choice, state, edits, problem, selected, reviewed } = entry;
      if (edits) entry.kept[entry.model] = { choice, state, edits, problem, selected, reviewed };
      Object.assign(entry, UNANSWERED, changes, entry.kept[changes.model]);
    }
    this.render();
  }

  /** Let all that wait have the problem of one. */
  fail(problem) {
    for (const entry of this.entries) if (entry.state === "waiting") Object.assign(entry, { state: "problem", problem });
  }

  /** The scan to be answered next: that which one looks at, or else the first one. */
  next() {
    if (this.current?.state === "waiting") return this.current;
    return this.entries.find(({ state }) => state === "waiting") ?? null;
  }

  /** Show the list, unless there is only one scan. */
  render() {
    const entries = this.entries;
    element("queue").hidden = entries.length < 2;
    if (entries.length < 2) return;
    const scans = element("scans");
    while (scans.children.length < entries.length) scans.append(newRow());
    entries.forEach((entry, at) => {
      const row = scans.children[at];
      const [name, state] = row.children;
      name.textContent = row.title = titleOf(entry.name, entry.choice);
      state.textContent = describe(entry);
      row.dataset.state = entry.state;
      row.ariaSelected = entry === this.current;
      row.tabIndex = entry === this.current ? 0 : -1; // one stop for the key Tab, however long the list is
    });
    // Disabled in words only: at an end, the button keeps the focus.
    element("before").ariaDisabled = this.#at <= 0;
    element("after").ariaDisabled = this.#at === entries.length - 1;
    const [answered, failed] = [this.answered.length, entries.filter(({ state }) => state === "problem").length];
    const counts = [`${entries.length} scans`, answered && `${answered} answered`, failed && `${failed} failed`];
    element("queue-title").textContent = counts.filter(Boolean).join(" · ");
    const part = answered < entries.length ? `${answered} of ${entries.length}` : "";
    Object.assign(element("save-all"), { disabled: !answered, textContent: `Download ${part || "all"}, CSV` });
    element("measure-all").textContent = part ? `Measurements of ${part}, CSV` : "All measurements, CSV";
    element("measure-all").hidden = !this.answered.some(({ edits }) => edits.original.measurements.length);
  }

  /** Scroll the list to the scan that is looked at. */
  reveal() {
    const row = element("scans").children[this.#at];
    if (row) reveal(element("scans"), row);
  }

  #turn(to) {
    const entry = this.entries[to];
    if (entry) this.onShow(entry);
  }
}

function newRow() {
  const row = document.createElement("li");
  row.role = "option";
  row.append(document.createElement("span"), document.createElement("span"));
  return row;
}

function describe({ state, edits, problem }) {
  if (state !== "done") {
    if (!problem || state === "cancelled") return WORDS[state];
    return nameOfProblem(problem);
  }
  const { landmarks, decided } = edits;
  const found = `${landmarks.filter(({ ijk }) => ijk).length} of ${landmarks.length} found`;
  const doubtful = countDoubtful(landmarks);
  return [found, doubtful && `${doubtful} doubtful`, decided && `${decided} by you`, problem?.undone].filter(Boolean).join(", ");
}
