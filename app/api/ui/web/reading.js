// Scans as NiiVue reads them; those that it does not read, or not as the service does, the service converts.

import { prepare } from "./contrast.js";
import { suffixOf } from "./files.js";
import { HEADER_BYTES } from "./pairs.js";
import { convertScan } from "./service.js";

const MAX_CONVERTED = 4; // as files, which are as large as scans
const TEXTS = ["mha", "nrrd"];
const LABELS = 1002; // NIfTI's code of an intent: NiiVue gives each value a colour of its own
// In such a header NiiVue takes a tab for a part of a number, and knows one spelling of the order of bytes only.
const MISREAD = /\t|ByteOrderMSB\s*=\s*[Tt1]/;

export class Reader {
  #converted = new Map(); // files, by the choice of their scan

  constructor(nv) {
    this.nv = nv;
  }

  /**
   * Read a scan of the list, as an image of NiiVue's that has not been sent to the graphics card; each change afterwards
   * sends it again. `isRead` resolves to whether the service reads it, once that is known.
   */
  async read(entry, isRead, signal) {
    const { file, choice } = entry;
    const convert = async () => this.#load(await this.#convert(entry, isRead, signal), "nii.gz");
    const volume = await this.#load(file, await suffixOf(file)).catch(convert).finally(() => signal.throwIfAborted());
    prepare(volume, choice.frame ?? 0);
    return volume;
  }

  /**
   * The service reads more than NiiVue, such as DICOM. A scan is sent for that once more, but neither beside the request
   * for its landmarks, nor if that fails, unless the model is for other scans, nor whenever it is shown.
   */
  async #convert({ file, choice }, isRead, signal) {
    if (!this.#converted.has(choice)) {
      if (!(await isRead)) throw new Error("not read");
      this.#converted.set(choice, await convertScan(file, choice, signal));
      if (this.#converted.size > MAX_CONVERTED) this.#converted.delete(this.#converted.keys().next().value);
    }
    return this.#converted.get(choice);
  }

  /** Have NiiVue read a file; throws if it does not, or not the voxels that are there. */
  async #load(file, suffix) {
    let volume = null;
    this.nv.addVolume = (read) => (volume = read);
    // NiiVue recognises formats by name, which may be missing or wrong.
    await this.nv.loadFromFile(new File([file], `scan.${suffix}`)).finally(() => delete this.nv.addVolume);
    const { hdr, img, nVox3D, nFrame4D } = volume;
    const header = TEXTS.includes(suffix) ? (await file.slice(0, HEADER_BYTES).text()).split(/\n\n|ElementDataFile/)[0] : "";
    // It may take other bytes for voxels, more or fewer; in NRRD, frames that come first for an axis; and vectors for colours.
    const isWhole = img.length && Number.isInteger(nFrame4D) && img.length === nVox3D * nFrame4D;
    const isGrey = hdr.intent_code !== LABELS && [hdr.scl_slope, hdr.scl_inter].every(Number.isFinite);
    const axes = hdr.dims[0];
    if (!(isWhole && isGrey) || axes < 3 || (suffix === "nrrd" && axes > 3) || MISREAD.test(header)) throw new Error("misread");
    return volume;
  }
}
