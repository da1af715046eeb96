// The scans of this page: a list of what was opened, each with its answer and corrections.

import { element } from "./element.js";
import { nameOf } from "./files.js";
import { isMisfit, MISFIT } from "./notices.js";

const WORDS = { waiting: "waiting", working: "working…", cancelled: "cancelled", problem: "problem" };

const UNANSWERED = { state: "waiting", edits: null, problem: null, abort: null, progress: null, selected: null, reviewed: false };

/**
 * An entry is {file, name, model, choice, state, edits, problem, abort, progress, selected, reviewed}; a file is only
 * referred to, and read again whenever it is shown. `onShow` gets the entry to look at.
 */
export class Queue {
  current = null;
  entries = [];

  constructor(onShow) {
    this.onShow = onShow;
    element("scans").onclick = ({ target }) => {
      const at = [...element("scans").children].indexOf(target.closest("li"));
      if (at >= 0) onShow(this.entries[at]);
    };
    element("before").onclick = () => this.#turn(-1);
    element("after").onclick = () => this.#turn(1);
  }

  /** Those that have an answer. */
  get answered() {
    return this.entries.filter(({ edits }) => edits);
  }

  /** Append files to be answered by a model; return the first one's entry. */
  add(files, model) {
    const added = files.map((file) => ({ file, name: nameOf(file), model, choice: {}, ...UNANSWERED }));
    this.entries.push(...added);
    this.render();
    return added[0];
  }

  /** Ask for the answers of some again. */
  again(entries, changes) {
    for (const entry of entries) Object.assign(entry, UNANSWERED, changes);
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
      const [button] = scans.children[at].children;
      const [name, state] = button.children;
      name.textContent = button.title = entry.name;
      state.textContent = describe(entry);
      scans.children[at].dataset.state = entry.state;
      button.ariaCurrent = entry === this.current || null;
    });
    const at = entries.indexOf(this.current);
    // Disabled in words only: at an end, the button keeps the focus.
    element("before").ariaDisabled = at <= 0;
    element("after").ariaDisabled = at === entries.length - 1;
    element("queue-title").textContent = `${entries.length} scans`;
    element("save-all").disabled = !this.answered.length;
  }

  #turn(by) {
    const entry = this.entries[this.entries.indexOf(this.current) + by];
    if (!entry) return;
    this.onShow(entry);
    element("scans").children[this.entries.indexOf(entry)].scrollIntoView({ block: "nearest" });
  }
}

function newRow() {
  const [row, button] = [document.createElement("li"), document.createElement("button")];
  button.type = "button";
  button.append(document.createElement("span"), document.createElement("span"));
  row.append(button);
  return row;
}

function describe({ state, edits, problem }) {
  if (state !== "done") {
    if (!problem || state === "cancelled") return WORDS[state];
    return isMisfit(problem) ? MISFIT : problem.title;
  }
  const { landmarks, decided } = edits;
  const found = `${landmarks.filter(({ ijk }) => ijk).length} of ${landmarks.length} found`;
  return [found, decided && `${decided} by you`, problem?.undone].filter(Boolean).join(", ");
}
