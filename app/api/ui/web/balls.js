// The balls: landmarks in 3D, which NiiVue draws as the nodes of a mesh.

const NODE_VALUES = { low_confidence: 1, detected: 2 };
const [PERSON_VALUE, SELECTED_VALUE] = [3, 4];
// Color stops for values 0 to 4, as in the table.
const COLORS = {
  R: [245, 245, 79, 190, 92], G: [189, 189, 214, 156, 200], B: [79, 79, 160, 255, 255],
  A: [255, 255, 255, 255, 255], I: [0, 64, 128, 191, 255],
};
const OPAQUE = 254;
const PARTS = { chosen: 50, other: 70 }; // of the scan's longest side

export class Balls {
  #nv;
  #mesh = null;

  constructor(nv) {
    this.#nv = nv;
    nv.addColormap("landmarkd", COLORS);
  }

  /**
   * Draw landmarks, which are {name, status, person, mm}, with the next scene; `selected` is an index, and `side` the
   * longest side of the scan in mm.
   */
  draw(landmarks, selected, side) {
    const nodes = landmarks.flatMap(({ name, status, person, mm }, index) => {
      if (!mm) return [];
      const chosen = index === selected;
      const value = chosen ? SELECTED_VALUE : person ? PERSON_VALUE : NODE_VALUES[status];
      return [{ name, x: mm[0], y: mm[1], z: mm[2], sizeValue: side / PARTS[chosen ? "chosen" : "other"], colorValue: value }];
    });
    // Not by addMesh and removeMesh, with which NiiVue sends the whole scan to the graphics card again.
    if (this.#mesh && nodes.length) {
      this.#mesh.nodes = nodes;
      this.#mesh.updateMesh(this.#nv.gl);
    } else if (this.#mesh) {
      this.#mesh.unloadMesh(this.#nv.gl);
      this.forget();
    } else if (nodes.length) {
      this.#mesh = this.#nv.loadConnectomeAsMesh({
        name: "landmarks", nodeColormap: "landmarkd", nodeMinColor: 0, nodeMaxColor: SELECTED_VALUE,
        nodeScale: 1, showLegend: false, nodes, edges: [],
      });
      this.#mesh.generatePosNormClr = withoutNaN;
      this.#mesh.updateMesh(this.#nv.gl);
      this.#nv.meshes = [this.#mesh];
    }
  }

  /** Begin anew, as the graphics card has no mesh any more. */
  forget() {
    [this.#nv.meshes, this.#mesh] = [[], null];
  }
}

/**
 * NiiVue copies the bytes of a color as a number of 32 bits, which is NaN where alpha is 255 and blue 128 or more: that
 * of Firefox is another one then, a dark blue.
 */
function withoutNaN(points, triangles, colors) {
  const bytes = colors.map((byte, at) => (at % 4 === 3 ? OPAQUE : byte));
  return Object.getPrototypeOf(this).generatePosNormClr.call(this, points, triangles, bytes);
}
