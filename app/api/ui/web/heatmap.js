// The heatmap of the chosen landmark, laid over the scan: requested only when somebody asks for it.

import { element } from "./element.js";
import { digitsOf, transform } from "./geometry.js";
import { makeHeatmap } from "./service.js";

const MAX_KEPT = 4; // as files, which are small: most of their voxels are 0

export class Heatmap {
  #kept = new Map(); // files of the scan that is looked at, by index of the landmark
  #index = -1; // of the landmark whose heatmap is asked for
  #abort = null;

  /** Show the heatmap of the landmark that is chosen of a scan, or hide it. */
  async toggle(entry, viewer) {
    const index = entry.selected;
    if (this.#index >= 0 || index < 0) return this.hide(viewer);
    const { name, ijk } = entry.edits.original.landmarks[index];
    const { signal } = (this.#abort = new AbortController());
    this.#index = index;
    this.#say(`Making the heatmap of ${name}…`);
    try {
      const file = this.#kept.get(index) ?? (await request(entry, name, signal));
      signal.throwIfAborted();
      this.#keep(index, file);
      const highest = await viewer.showHeatmap(file, signal);
      const { volume } = entry.edits.original;
      if (!entry.edits.landmarks[index].ijk) viewer.select(index, transform(volume.affine, highest.ijk));
      this.#say(describe(name, highest, ijk, volume));
    } catch (error) {
      if (signal.aborted) return;
      this.#index = -1;
      if (error.code === "unauthorized") element("ask-key").hidden = false;
      this.#say(`No heatmap of ${name}: ${error.message}`);
    }
  }

  /** Hide it, and give up a request for it, unless it is that of a landmark. */
  hide(viewer, unless = -1) {
    if (unless >= 0 && unless === this.#index) return;
    this.#abort?.abort();
    this.#index = -1;
    viewer?.hideHeatmap();
    this.#say("");
  }

  /** Another scan is looked at, or it is asked again. */
  forget(viewer) {
    this.#kept.clear();
    this.hide(viewer);
  }

  #keep(index, file) {
    this.#kept.delete(index);
    this.#kept.set(index, file);
    if (this.#kept.size > MAX_KEPT) this.#kept.delete(this.#kept.keys().next().value);
  }

  #say(words) {
    element("heatmap").textContent = words;
    element("show-heatmap").setAttribute("aria-pressed", this.#index >= 0);
  }
}

async function request({ file, model, choice }, landmark, signal) {
  return new File([await makeHeatmap(file, { model, landmark, ...choice }, signal)], "heatmap.nii.gz");
}

/** Say in words what is shown; `highest` is the voxel of the highest value, `ijk` where the network found the point. */
function describe(name, highest, ijk, volume) {
  if (!highest.value) return `Heatmap of ${name}: empty, the network sees it nowhere.`;
  const [from, to] = [highest.ijk, ijk ?? highest.ijk].map((at) => transform(volume.affine, at));
  const apart = Math.hypot(...from.map((mm, axis) => mm - to[axis])).toFixed(digitsOf(volume));
  const off = ijk ? `, ${apart} mm from the point found` : "";
  const value = `${highest.value.toFixed(2)} of 1 at voxel ${highest.ijk.join(", ")}`;
  return `Heatmap of ${name}, from red to yellow: its highest value is ${value}${off}.`;
}
