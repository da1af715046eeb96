// Files and folders of scans: chosen, or dropped on the page.

const paths = new WeakMap(); // of files that were dropped with their folder

const element = (id) => document.getElementById(id);

/** The name of a file, with its folder, as in many studies all scans have the same name. */
export const nameOf = (file) => paths.get(file) ?? (file.webkitRelativePath || file.name);

/** Call `open` with the scans that somebody drops or chooses. */
export function listenForFiles(open) {
  const drop = document.documentElement;
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    open(await filesOf(event.dataTransfer));
  });
  element("choose").onclick = element("welcome").onclick = () => element("file").click();
  element("choose-folder").onclick = () => element("folder").click();
  const choose = (isWanted) => ({ target }) => {
    open([...target.files].filter(({ name }) => isWanted(name)));
    target.value = ""; // so that the same file can be chosen again
  };
  element("file").onchange = choose(() => true);
  element("folder").onchange = choose(isScan);
}

/** Whether the picker would offer a file of this name. */
const isScan = (name) =>
  element("file").accept.split(",").some((suffix) => suffix.startsWith(".") && name.toLowerCase().endsWith(suffix));

/** The suffix of a scan's format, by its first bytes; throws what the viewer says of one that it does not show. */
export async function suffixOf(file) {
  const start = String.fromCharCode(...new Uint8Array(await file.slice(0, 132).arrayBuffer()));
  if (start.startsWith("PK") || start.endsWith("DICM")) {
    throw Object.assign(new Error("DICOM"), { note: "The viewer does not show DICOM. Landmarks are listed." });
  }
  if (start.startsWith("\x1f\x8b")) return "nii.gz";
  if (start.startsWith("NRRD")) return "nrrd";
  return start.startsWith("ObjectType") || start.startsWith("NDims") ? "mha" : "nii";
}

/** The scans among what was dropped; folders are searched. */
async function filesOf(transfer) {
  // Before anything is awaited: afterwards the items are gone.
  const items = [...transfer.items].map((item) => item.webkitGetAsEntry?.());
  const files = [...transfer.files];
  if (!items.some((item) => item?.isDirectory)) return files;
  const found = await Promise.all(items.map((item) => item && filesIn(item, () => true)));
  return found.flat().filter(Boolean);
}

/** Files below a folder, by name. */
async function filesIn(item, isWanted = isScan) {
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
  return (await Promise.all(children.map((child) => filesIn(child)))).flat();
}
