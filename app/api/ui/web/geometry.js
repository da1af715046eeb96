// Affines of voxel indexes, as rows of numbers.

/** Map a point by an affine. */
export function transform(affine, point) {
  return [0, 1, 2].map((row) => affine[row][3] + point.reduce((sum, at, axis) => sum + affine[row][axis] * at, 0));
}

/** The affine that maps back. */
export function invert(affine) {
  const [a, b, c] = affine;
  const minors = [cross(b, c), cross(c, a), cross(a, b)];
  const volume = a[0] * minors[0][0] + a[1] * minors[0][1] + a[2] * minors[0][2];
  const shift = [a[3], b[3], c[3]];
  return [0, 1, 2].map((row) => {
    const scale = minors.map((minor) => minor[row] / volume);
    return [...scale, -scale.reduce((sum, factor, axis) => sum + factor * shift[axis], 0)];
  });
}

/** The decimals of a position in mm: the last is a tenth to a hundredth of a voxel, and there are two at least. */
export const digitsOf = ({ spacing_mm }) => Math.max(2, 1 - Math.floor(Math.log10(Math.min(...spacing_mm))));

const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
