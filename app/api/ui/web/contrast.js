// The values of a scan, and which of them are drawn black and white.

const MOST = 3.4028234663852886e38; // the largest value of float32, which graphics cards have
const BONE_PART = 0.3; // of the range from black to white that is black for bone

/**
 * Prepare a scan of NiiVue's before the graphics card gets it: choose a frame, and find the range of its voxels. Those
 * that are infinite get the smallest value, as in the service: for one of them, NiiVue would draw the whole scan black.
 */
export function prepare(volume, frame) {
  const { hdr, img } = volume;
  volume.frame4D = Math.min(frame, volume.nFrame4D - 1);
  const size = hdr.dims[1] * hdr.dims[2] * hdr.dims[3];
  const voxels = img.subarray(volume.frame4D * size, (volume.frame4D + 1) * size);
  let [least, most, infinite] = [Infinity, -Infinity, false];
  for (let at = 0; at < voxels.length; at++) {
    const value = voxels[at];
    if (value < -MOST || value > MOST) {
      infinite = true;
      continue;
    }
    if (value < least) least = value;
    if (value > most) most = value;
  }
  if (infinite) voxels.forEach((value, at) => Math.abs(value) > MOST && (voxels[at] = least));
  // A range in the header is for display, but often that of values before they were scaled.
  volume.trustCalMinMax = volume.ignoreZeroVoxels = false;
  volume.calMinMax();
  const range = [least, most].map((value) => value * hdr.scl_slope + hdr.scl_inter);
  // NiiVue looks at the middle of a scan only.
  [volume.global_min, volume.global_max] = [Math.min(...range), Math.max(...range)];
}

/**
 * The values of a scan that can be black and white: "auto", without the rarest; "full", all there are; and "bone",
 * brighter tissue with more contrast.
 */
export function rangesOf({ robust_min: low, robust_max: high, global_min: least, global_max: most }) {
  return { auto: [low, high], full: [least, most], bone: [low + BONE_PART * (high - low), high] };
}

/** The name of the range that is drawn; null: another one, as somebody chose by hand. */
export function nameOfRange(volume) {
  const isDrawn = ([, [from, to]]) => volume.cal_min === from && volume.cal_max === to;
  return Object.entries(rangesOf(volume)).find(isDrawn)?.[0] ?? null;
}
