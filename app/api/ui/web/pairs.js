// Headers, and voxels in files of their own -> one file of both each; app/io/scan_file.py does so for paths.

export const HEADER_BYTES = 1 << 16; // of a header that is text, at most
// Of NIfTI-1 and NIfTI-2: bytes of a header, and where it says what it is and, by which calls, where its voxels begin.
const NIFTI = [
  { size: 348, kind: 344, offset: 108, get: "getFloat32", set: "setFloat32", add: (sum, more) => sum + more },
  { size: 540, kind: 4, offset: 168, get: "getBigInt64", set: "setBigInt64", add: (sum, more) => sum + BigInt(more) },
];

/** Join headers with the voxels that lie beside them. `nameOf` tells a file's folder, too; `made` is told of what is new. */
export async function joinPairs(files, nameOf, made) {
  const byName = new Map(files.map((file) => [nameOf(file), file]));
  const joined = new Map();
  for (const file of files) {
    const split = { mhd: splitMetaImage, nhdr: splitNrrd, hdr: splitNifti }[file.name.toLowerCase().split(".").pop()];
    const pair = await split?.(file).catch(() => null); // What cannot be read is found when it is sent.
    const voxels = pair && byName.get(nameOf(file).slice(0, -file.name.length) + pair.name);
    if (!voxels) continue;
    joined.set(file, new File([...pair.start, voxels], file.name));
    made(joined.get(file), file);
    joined.set(voxels, null);
  }
  return files.map((file) => (joined.has(file) ? joined.get(file) : file)).filter(Boolean);
}

/** The header's text: a character for each byte. */
const textOf = async (file) => new TextDecoder("latin1").decode(await file.slice(0, HEADER_BYTES).arrayBuffer());

async function splitMetaImage(file) {
  const field = /^[ \t]*ElementDataFile[ \t]*=(.*)$/dm.exec(await textOf(file));
  return field && { start: [file.slice(0, field.index), "ElementDataFile = LOCAL\n"], name: await nameIn(file, field) };
}

async function splitNrrd(file) {
  const text = (await textOf(file)).split(/\r?\n\r?\n/)[0].trimEnd();
  const field = /^data ?file[ \t]*:(?!=)(.*)\n?/dim.exec(text);
  if (!field) return null;
  const after = field.indices[0][1];
  const end = after < text.length ? [file.slice(after, text.length), "\n\n"] : ["\n"];
  return { start: [file.slice(0, field.index), ...end], name: await nameIn(file, field) };
}

async function nameIn(file, { indices: [, [start, end]] }) {
  const name = (await file.slice(start, end).text()).trim();
  return name.startsWith("./") ? name.slice(2) : name;
}

async function splitNifti(file) {
  const bytes = await file.slice(0, NIFTI.at(-1).size).arrayBuffer();
  const kindAt = ({ kind }) => String.fromCharCode(...new Uint8Array(bytes.slice(kind, kind + 3)));
  const layout = NIFTI.find((one, index) => kindAt(one) === `ni${index + 1}`);
  if (!layout || bytes.byteLength < layout.size) return null;
  const { size, kind, offset, get, set, add } = layout;
  const header = new DataView(bytes, 0, size);
  const isLittle = header.getInt32(0, true) === size;
  header[set](offset, add(header[get](offset, isLittle), size + 4), isLittle);
  header.setUint8(kind + 1, "+".charCodeAt(0));
  return { start: [header, new Uint8Array(4)], name: file.name.replace(/hdr$/i, "img") };
}
