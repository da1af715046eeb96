// Files and folders of scans: chosen, or dropped on the page.

import { element } from "./element.js";
import { zip } from "./zip.js";

const paths = new WeakMap(); // of files that were dropped with their folder

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
  const chosen = (target) => {
    const files = [...target.files];
    target.value = ""; // so that the same file can be chosen again
    return files;
  };
  element("file").onchange = async ({ target }) => open(await packed(chosen(target)));
  element("folder").onchange = async ({ target }) => open(await scansAmong(chosen(target)));
}

/** Whether a file is a scan by its name. Those of DICOM often have none, and many are one scan. */
const isScan = ({ name }) =>
  element("file").accept.split(",").some((suffix) => /^\.(?!dcm)/.test(suffix) && name.toLowerCase().endsWith(suffix));

const isDicom = (file) => file.slice(128, 132).text().then((text) => text === "DICM", () => false);

/** The scans among the files below a folder; if none is one by its name, an archive of all DICOM files. */
async function scansAmong(files) {
  const shown = files.filter(({ name }) => !name.startsWith("."));
  const scans = shown.filter(isScan);
  if (scans.length) return scans;
  const dicom = await dicomAmong(shown);
  return dicom.length ? [await archive(dicom)] : [];
}

/** Files that were opened without a folder; several of DICOM are one scan, as they are in a folder. */
async function packed(files) {
  const dicom = await dicomAmong(files);
  if (dicom.length < 2) return files;
  return [...files.filter((file) => !dicom.includes(file)), await archive(dicom)];
}

async function dicomAmong(files) {
  const dicom = [];
  for (const file of files) if (await isDicom(file)) dicom.push(file);
  return dicom;
}

/** An archive of DICOM files, which is named after their folder, or the first one. */
const archive = (dicom) => zip(dicom, `${nameOf(dicom[0]).split("/")[0].replace(/\.dcm$/i, "")}.zip`);

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
  if (!items.some((item) => item?.isDirectory)) return packed(files);
  const found = items.filter(Boolean).map(async (item) => {
    const below = await filesIn(item);
    return item.isDirectory ? scansAmong(below) : below;
  });
  return packed((await Promise.all(found)).flat());
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
