// Files and folders of scans: chosen, or dropped on the page.

import { element } from "./element.js";
import { joinPairs } from "./pairs.js";
import { isReadable } from "./service.js";
import { zip } from "./zip.js";

const paths = new WeakMap(); // of files that were dropped with their folder, or are made of several

/** The name of a file, with its folder, as in many studies all scans have the same name. */
export const nameOf = (file) => paths.get(file) ?? (file.webkitRelativePath || file.name);

/** Call `open` with the scans among what somebody drops or chooses, and with the names of files that are left out. */
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
    open(...(await filesOf(event.dataTransfer)));
  });
  element("choose").onclick = element("welcome").onclick = () => element("file").click();
  element("choose-folder").onclick = () => element("folder").click();
  const chosen = (target) => {
    const files = [...target.files];
    target.value = ""; // so that the same file can be chosen again
    return files;
  };
  element("file").onchange = async ({ target }) => open(...(await scansAmong(chosen(target))));
  element("folder").onchange = async ({ target }) => open(...(await scansAmong(chosen(target), true)));
}

/** Whether a file is a scan by its name. Those of DICOM often have none, and many are one scan. */
const isNamed = ({ name }) =>
  element("file").accept.split(",").some((suffix) => /^\.(?!dcm|z?raw|img)/.test(suffix) && name.toLowerCase().endsWith(suffix));

/** The format of a file by its first bytes; "": unknown, or the file cannot be read. */
async function formatOf(file) {
  const bytes = await file.slice(0, 348).arrayBuffer().catch(() => new ArrayBuffer());
  const start = String.fromCharCode(...new Uint8Array(bytes));
  if (start.startsWith("PK")) return "zip";
  if (start.startsWith("DICM", 128)) return "dcm";
  if (start.startsWith("\x1f\x8b")) return /\.mgz$/i.test(file.name) ? "mgz" : "nii.gz";
  if (start.startsWith("NRRD")) return "nrrd";
  if (start.startsWith("\0\0\0\x01")) return "mgh";
  if (start.startsWith("ObjectType") || start.startsWith("NDims")) return "mha";
  return start.startsWith("n+1", 344) || start.startsWith("n+2", 4) ? "nii" : "";
}

/**
 * The scans among files, and the names of the others: [scans, names]. Scans have the name or the first bytes of one, and
 * all DICOM files are one, as are a header and its voxels. Of a folder that has scans by their names, the others are not looked at.
 */
async function scansAmong(files, isFolder = false) {
  const parts = files.filter(({ name }) => !name.startsWith("."));
  const shown = await joinPairs(parts, nameOf, (joined, file) => paths.set(joined, nameOf(file)));
  const formats = new Map(shown.filter(isNamed).map((file) => [file, "named"]));
  if (!isFolder || !formats.size) {
    for (const file of shown) if (!formats.has(file)) formats.set(file, await formatOf(file));
  }
  const of = (...some) => shown.filter((file) => some.includes(formats.get(file)));
  const [scans, dicom] = [of("named", "nii", "nrrd", "mha", "mgh"), of("dcm")];
  const others = shown.filter((file) => !scans.includes(file) && !dicom.includes(file));
  if (dicom.length) scans.push(dicom.length > 1 || isFolder ? await archive(dicom) : dicom[0]);
  return [scans, others.map(nameOf)];
}

/** An archive of DICOM files, which is named after their folder, or the first one. */
const archive = (dicom) => zip(dicom, `${nameOf(dicom[0]).split("/")[0].replace(/\.dcm$/i, "")}.zip`);

/** The suffix of a scan's format, by its first bytes; throws what is said of a file that is gone. */
export async function suffixOf(file) {
  if (await isReadable(file)) return (await formatOf(file)) || "nii";
  const note = "The viewer cannot show this scan: its file was changed, moved or removed after it was opened. Please open it again.";
  throw Object.assign(new Error(note), { note });
}

/** The scans among what was dropped, and the names of the others; folders are searched. */
async function filesOf(transfer) {
  // Before anything is awaited: afterwards the items are gone.
  const items = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const files = [...transfer.files];
  const folders = items.filter(({ isDirectory }) => isDirectory);
  if (!folders.length) return scansAmong(files);
  const beside = items.filter((item) => !folders.includes(item)).map((item) => filesIn(item));
  const found = await Promise.all([
    ...folders.map(async (folder) => scansAmong(await filesIn(folder), true)),
    scansAmong((await Promise.all(beside)).flat()),
  ]);
  return [0, 1].map((part) => found.flatMap((some) => some[part]));
}

/** All files below a folder, by name; what cannot be read is left out. */
async function filesIn(item) {
  if (item.isFile) {
    const file = await new Promise((resolve) => item.file(resolve, () => resolve(null)));
    if (file) paths.set(file, item.fullPath.slice(1));
    return file ? [file] : [];
  }
  const reader = item.createReader();
  const children = [];
  // It returns some at a time, and none at the end.
  for (let some; (some = await new Promise((resolve) => reader.readEntries(resolve, () => resolve([])))).length; ) {
    children.push(...some);
  }
  children.sort((one, other) => one.name.localeCompare(other.name));
  return (await Promise.all(children.map((child) => filesIn(child)))).flat();
}
