// Headers, and voxels in files of their own -> one file of both each; app/io/detached.py does so for paths.

const HEADER_BYTES = 1 << 20; // of a header that is text, at most
const PAIR_BYTES = 348; // of one of NIfTI-1, which is known by its end

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
  const header = new DataView(await file.slice(0, PAIR_BYTES).arrayBuffer());
  if (header.byteLength < PAIR_BYTES || header.getUint32(PAIR_BYTES - 4) !== 0x6e693100) return null; // "ni1"
  const isLittle = header.getInt32(0, true) === PAIR_BYTES;
  header.setFloat32(108, PAIR_BYTES + 4 + header.getFloat32(108, isLittle), isLittle); // where the voxels begin
  header.setUint32(PAIR_BYTES - 4, 0x6e2b3100); // "n+1"
  return { start: [header, new Uint8Array(4)], name: file.name.replace(/hdr$/i, "img") };
}
