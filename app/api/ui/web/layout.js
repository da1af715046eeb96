// Where three planes and 3D are drawn, so that each is as large as it can be.

export const RENDER_TILE = 4;
// Axes to the right, upwards and through the slice, of an axial, a coronal and a sagittal plane.
export const PLANES = [[0, 1, 2], [0, 2, 1], [1, 2, 0]];
const FLAT = 2; // a scan is flat if one plane shows so many times as much of it as any other
const MAIN_PART = 0.6; // of the width or height, for that plane

/**
 * Arrange a scan of so many mm along x, y and z on a canvas; return tiles for NiiVue to draw, or, if there are none, the
 * number of its own layout: 1 for a column, 2 for a grid, 3 for a row.
 */
export function arrange(size, width, height) {
  const area = PLANES.map(([across, up]) => size[across] * size[up]);
  const [main, second, third] = [0, 1, 2].sort((one, other) => area[other] - area[one]);
  if (area[main] < FLAT * area[second]) return { tiles: [], layout: largest(size, width, height) };
  // Most of the room for the plane of a flat scan, beside or above all others.
  const position = (start, part, from, share) => (width > height ? [start, from, part, share] : [from, start, share, part]);
  const others = [second, third, RENDER_TILE].map((sliceType, index) => (
    { sliceType, position: position(MAIN_PART, 1 - MAIN_PART, index / 3, 1 / 3) }
  ));
  return { tiles: [{ sliceType: main, position: position(0, MAIN_PART, 0, 1) }, ...others], layout: 0 };
}

/** Where the slice in a tile of NiiVue's lies, through its plane: slices of an oblique scan are not along the axes of the world. */
export const depthAt = ({ AxyzMxy: [x, y, z, byX, byY] }, right, high) => z + byY * (high - y) - byX * (right - x);

/** The layout that shows all four the largest; NiiVue would compare three planes, and then add 3D. */
function largest([x, y, z], width, height) {
  const side = Math.max(x, y, z); // of 3D
  const needed = [[side, y + 2 * z + side], [x + y, y + z], [2 * x + y + side, Math.max(y, z)]];
  const scales = needed.map(([across, down]) => Math.min(width / across, height / down));
  return 1 + scales.indexOf(Math.max(...scales));
}
