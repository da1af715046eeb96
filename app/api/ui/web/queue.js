// The scans of this page: a list of what was opened, each with its answer and corrections.

const WORDS = { waiting: "waiting", working: "working…", cancelled: "cancelled", problem: "problem" };

const UNANSWERED = { state: "waiting", edits: null, problem: null, abort: null, progress: null, selected: null };
const paths = new WeakMap(); // of files that were dropped with their folder

const element = (id) => document.getElementById(id);

/**
 * An entry is {file, name, model, choice, state, edits, problem, abort, progress, selected}; a file is only referred
 * to, and read again whenever it is shown. `onShow` gets the entry to look at.
 */
export class Queue {
  current = null;
  #entries = [];

  constructor(onShow) {
    this.onShow = onShow;
    element("scans").onclick = ({ target }) => {
      const at = [...element("scans").children].indexOf(target.closest("li"));
      if (at >= 0) onShow(this.#entries[at]);
    };
    element("before").onclick = () => this.#turn(-1);
    element("after").onclick = () => this.#turn(1);
  }

  get entries() {
    return this.#entries;
  }

  /** Those that have an answer. */
  get answered() {
    return this.#entries.filter(({ edits }) => edits);
  }

  /** Append files to be answered by a model; return the first one's entry. */
  add(files, model) {
    // With the folder, as in many studies all scans have the same name.
    const nameOf = (file) => paths.get(file) ?? (file.webkitRelativePath || file.name);
    const added = files.map((file) => ({ file, name: nameOf(file), model, choice: {}, ...UNANSWERED }));
    this.#entries.push(...added);
    this.render();
    return added[0];
  }

  /** Ask for an answer again. */
  again(entry, changes = {}) {
    Object.assign(entry, UNANSWERED, changes);
    this.render();
  }

  /** The scan to be answered next: that which one looks at, or else the first one. */
  next() {
    if (this.current?.state === "waiting") return this.current;
    return this.#entries.find(({ state }) => state === "waiting") ?? null;
  }

  /** Show the list, unless there is only one scan. */
  render() {
    const entries = this.#entries;
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
      if (entry === this.current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    const at = entries.indexOf(this.current);
    element("before").disabled = at <= 0;
    element("after").disabled = at === entries.length - 1;
    element("queue-title").textContent = `${entries.length} scans`;
    element("save-all").disabled = !this.answered.length;
  }

  #turn(by) {
    const entry = this.#entries[this.#entries.indexOf(this.current) + by];
    if (!entry) return;
    this.onShow(entry);
    element("scans").children[this.#entries.indexOf(entry)].scrollIntoView({ block: "nearest" });
  }
}

/** The scans among what was dropped; folders are searched. `isScan` says so of a name in a folder. */
export async function filesOf(transfer, isScan) {
  // Before anything is awaited: afterwards the items are gone.
  const items = [...transfer.items].map((item) => item.webkitGetAsEntry?.());
  const files = [...transfer.files];
  if (!items.some((item) => item?.isDirectory)) return files;
  const found = await Promise.all(items.map((item) => item && filesIn(item, () => true, isScan)));
  return found.flat().filter(Boolean);
}

/** Files below a folder, by name. */
async function filesIn(item, isWanted, isScan) {
  if (item.isFile) {
    if (!isWanted(item.name)) return [];
    const file = await new Promise((resolve, reject) => item.file(resolve, reject));
    paths.set(file, item.fullPath.slice(1));
    return [file];
  }
  const reader = item.createReader();
  const children = [];
  // It returns some at a time, and none at the end.
  for (let some; (some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject))).length; ) {
    children.push(...some);
  }
  children.sort((one, other) => one.name.localeCompare(other.name));
  return (await Promise.all(children.map((child) => filesIn(child, isScan, isScan)))).flat();
}

function newRow() {
  const [row, button] = [document.createElement("li"), document.createElement("button")];
  button.type = "button";
  button.append(document.createElement("span"), document.createElement("span"));
  row.append(button);
  return row;
}

function describe({ state, edits, problem }) {
  if (state !== "done") return problem && state === "problem" ? problem.title : WORDS[state];
  const { landmarks, decided } = edits;
  const found = `${landmarks.filter(({ ijk }) => ijk).length} of ${landmarks.length} found`;
  return decided ? `${found}, ${decided} by you` : found;
}
