// Files -> one ZIP archive of them (PKWARE's APPNOTE.TXT, 4.3), as the service takes the files of a DICOM series.

const VERSION = 10;
const DAY = 0x21; // 1 January 1980, the first there is
const MAX_ENTRIES = 0xffff; // stands for more, which the service refuses

const CHECKSUMS = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = (byte >>> 1) ^ (byte & 1 ? 0xedb88320 : 0);
  return byte;
});

/** Store files in an archive. They are numbered: their names and dates are nobody's business. */
export async function zip(files, name) {
  const [stored, directory] = [[], []];
  let offset = 0;
  for (const [number, file] of files.entries()) {
    const label = new TextEncoder().encode(number);
    const { size } = file;
    // Version, flags, method, time, date, checksum, both sizes, lengths of the name and of what may follow it.
    const about = pack("2222244422", VERSION, 0, 0, 0, DAY, await checksumOf(file), size, size, label.length, 0);
    stored.push("PK\x03\x04", about, label, file);
    // Lengths and attributes that are zero, and where the file is.
    directory.push("PK\x01\x02", pack("2", VERSION), about, pack("22244", 0, 0, 0, 0, offset), label);
    offset += 4 + about.length + label.length + size;
  }
  const { size } = new Blob(directory);
  const count = Math.min(files.length, MAX_ENTRIES);
  const end = pack("2222442", 0, 0, count, count, size, offset, 0);
  return new File([...stored, ...directory, "PK\x05\x06", end], name);
}

async function checksumOf(file) {
  let crc = ~0;
  // What cannot be read is found when the archive is sent.
  const content = await file.arrayBuffer().catch(() => []);
  for (const byte of new Uint8Array(content)) crc = CHECKSUMS[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return ~crc >>> 0;
}

/** Numbers as little-endian bytes, of so many bytes each. */
function pack(sizes, ...numbers) {
  const bytes = [...sizes].flatMap((size, at) => Array.from({ length: size }, (_, place) => (numbers[at] / 256 ** place) & 0xff));
  return Uint8Array.from(bytes);
}
