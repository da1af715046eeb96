// The viewer: NiiVue with three planes and 3D, and the names beside the points.

const VIEWS = { axial: 0, coronal: 1, sagittal: 2, all: 3, render: 4 };
const NODE_VALUES = { low_confidence: 1, detected: 2 };
const SELECTED_VALUE = 3;
// Color stops for values 0 to 3, as in the table.
const COLORS = {
  R: [245, 245, 79, 92], G: [189, 189, 214, 200], B: [79, 79, 160, 255],
  A: [255, 255, 255, 255], I: [0, 85, 170, 255],
};
const OPTIONS = {
  backColor: [0.03, 0.04, 0.05, 1],
  crosshairColor: [0.36, 0.78, 1, 0.7],
  crosshairWidthUnit: "mm",
  fontColor: [0.6, 0.65, 0.71, 1],
  fontMinPx: 12,
  dragAndDropEnabled: false,
  isSliceMM: true, // slices along world axes, so that points align with oblique scans
  multiplanarShowRender: 1,
  tileMargin: 2,
  meshXRay: 0.8, // points are visible through the surface of the scan
  loadingText: "",
  logLevel: "silent",
};
const RENDER_TILE = 4;
const HOVER_PX = 14; // distance from the pointer, in CSS pixels
const MAX_NAMES = 20; // more are hidden at first, because they overlap

/** A viewer, or null where there is no NiiVue or no WebGL 2. */
export async function makeViewer(canvas, labels, callbacks) {
  if (document.body.dataset.viewer !== "present") return null;
  if (!document.createElement("canvas").getContext("webgl2")) return null;
  const { Niivue } = await import("./niivue.js");
  const nv = new Niivue(OPTIONS);
  await nv.attachToCanvas(canvas);
  nv.addColormap("landmarkd", COLORS);
  return new Viewer(nv, canvas, labels, callbacks);
}

class Viewer {
  #landmarks = [];
  #selected = -1;
  #hovered = -1;
  #pressed = null;
  #mesh = null;
  #names = true;

  /** `onSelect` and `onHover` get the index of a landmark in the answer. */
  constructor(nv, canvas, labels, { onSelect, onHover }) {
    Object.assign(this, { nv, canvas, labels, onSelect, onHover });
    const draw = nv.drawScene.bind(nv);
    nv.drawScene = () => {
      const result = draw();
      this.#label();
      return result;
    };
    canvas.addEventListener("pointermove", (event) => this.#hover(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.#hover(-1));
    canvas.addEventListener("pointerdown", (event) => (this.#pressed = [event.offsetX, event.offsetY]));
    canvas.addEventListener("click", (event) => this.#click(event));
  }

  /** Show a scan without landmarks. */
  async show(file) {
    this.clear();
    // NiiVue recognises formats by name, which may be missing or wrong.
    await this.nv.loadFromFile(new File([file], `scan.${await suffixOf(file)}`));
  }

  clear() {
    this.setLandmarks([]);
    for (const volume of [...this.nv.volumes]) this.nv.removeVolume(volume);
  }

  /** Show landmarks; those without a position keep their index. */
  setLandmarks(landmarks) {
    const [volume] = this.nv.volumes;
    this.#selected = this.#hovered = -1;
    // By voxel index and NiiVue's own affine: it may not prefer the form that the service uses.
    this.#landmarks = landmarks.map(({ name, status, ijk }) => ({
      name, status, mm: ijk && transform(volume.hdr.affine, ijk),
    }));
    this.labels.replaceChildren();
    this.#names = landmarks.length <= MAX_NAMES;
    this.#draw();
  }

  get names() {
    return this.#names;
  }

  set names(shown) {
    this.#names = shown;
    this.#label();
  }

  /** Move the crosshair to a landmark. */
  select(index) {
    this.#selected = index;
    const landmark = this.#landmarks[index];
    if (landmark?.mm) this.nv.scene.crosshairPos = this.nv.mm2frac(landmark.mm);
    this.#draw();
  }

  hover(index) {
    this.#hovered = index;
    this.#label();
  }

  view(name) {
    this.nv.setSliceType(VIEWS[name]);
  }

  /** Positions of landmarks on the canvas: {index, x, y} in CSS pixels, for each slice that shows them. */
  screenPositions() {
    const scale = this.canvas.width / this.canvas.clientWidth;
    const found = [];
    for (const tile of this.nv.screenSlices) {
      this.#landmarks.forEach(({ mm }, index) => {
        const position = mm && (tile.axCorSag === RENDER_TILE ? this.#inRender(tile, mm) : this.#inPlane(tile, mm));
        if (position) found.push({ index, x: position[0] / scale, y: position[1] / scale });
      });
    }
    return found;
  }

  #draw() {
    const nodes = this.#landmarks.flatMap(({ name, status, mm }, index) =>
      mm ? [{ name, x: mm[0], y: mm[1], z: mm[2], sizeValue: this.#radius * (index === this.#selected ? 1.3 : 1),
        colorValue: index === this.#selected ? SELECTED_VALUE : NODE_VALUES[status] }] : []);
    if (this.#mesh) this.nv.removeMesh(this.#mesh);
    this.#mesh = nodes.length
      ? this.nv.loadConnectomeAsMesh({
          name: "landmarks", nodeColormap: "landmarkd", nodeMinColor: 0, nodeMaxColor: SELECTED_VALUE,
          nodeScale: 1, showLegend: false, nodes, edges: [],
        })
      : null;
    if (this.#mesh) this.nv.addMesh(this.#mesh);
    this.nv.opts.crosshairWidth = this.#radius / 4;
    this.nv.opts.crosshairGap = this.#radius * 2;
    this.nv.setMeshThicknessOn2D(this.#depth);
    this.nv.drawScene();
  }

  /** Largest distance in mm from a slice at which a point is shown on it. */
  get #depth() {
    return 2 * this.#radius;
  }

  /** Radius of the points in mm: about a fiftieth of the scan. */
  get #radius() {
    const [volume] = this.nv.volumes;
    if (!volume) return 1;
    const sizes = [1, 2, 3].map((axis) => volume.hdr.dims[axis] * volume.hdr.pixDims[axis]);
    return Math.max(...sizes) / 48;
  }

  #inRender(tile, mm) {
    const { renderAzimuth, renderElevation } = this.nv.scene;
    const [left, top, width, height] = tile.leftTopWidthHeight;
    const [m] = this.nv.calculateMvpMatrix(null, tile.leftTopWidthHeight, renderAzimuth, renderElevation);
    const clip = [0, 1, 3].map((row) => m[row] * mm[0] + m[4 + row] * mm[1] + m[8 + row] * mm[2] + m[12 + row]);
    return [left + ((clip[0] / clip[2] + 1) / 2) * width, top + ((1 - clip[1] / clip[2]) / 2) * height];
  }

  #inPlane(tile, mm) {
    const [across, up, through] = [[0, 1, 2], [0, 2, 1], [1, 2, 0]][tile.axCorSag];
    const at = this.nv.frac2mm(this.nv.scene.crosshairPos)[through];
    if (Math.abs(mm[through] - at) > this.#depth) return null;
    const [left, top, width, height] = tile.leftTopWidthHeight;
    const right = (mm[across] - tile.leftTopMM[0]) / tile.fovMM[0];
    const high = (mm[up] - tile.leftTopMM[1]) / tile.fovMM[1];
    // A negative width is a slice seen from the other side.
    return [left + right * width, top + (1 - high) * height];
  }

  #label() {
    const shown = this.screenPositions().filter(
      ({ index }) => this.#names || index === this.#selected || index === this.#hovered,
    );
    while (this.labels.children.length < shown.length) this.labels.append(document.createElement("span"));
    [...this.labels.children].forEach((label, at) => {
      label.hidden = at >= shown.length;
      if (label.hidden) return;
      const { index, x, y } = shown[at];
      label.textContent = this.#landmarks[index].name;
      label.className = index === this.#selected || index === this.#hovered ? "near" : "";
      label.style.transform = `translate(${(x + 9).toFixed(1)}px, ${(y - 22).toFixed(1)}px)`;
    });
  }

  #at({ offsetX, offsetY }) {
    const [best] = this.screenPositions()
      .map(({ index, x, y }) => ({ index, distance: Math.hypot(x - offsetX, y - offsetY) }))
      .sort((one, other) => one.distance - other.distance);
    return best?.distance <= HOVER_PX ? best.index : -1;
  }

  #hover(index) {
    this.canvas.style.cursor = index < 0 ? "crosshair" : "pointer";
    if (index === this.#hovered) return;
    this.hover(index);
    this.onHover(index);
  }

  #click(event) {
    const [x, y] = this.#pressed ?? [NaN, NaN];
    const index = this.#at(event);
    // A drag rotates the scan or moves the crosshair; it does not select.
    if (index >= 0 && Math.hypot(event.offsetX - x, event.offsetY - y) < 4) this.onSelect(index);
  }
}

/** The suffix of a scan's format, by its first bytes. */
async function suffixOf(file) {
  const start = String.fromCharCode(...new Uint8Array(await file.slice(0, 132).arrayBuffer()));
  if (start.startsWith("PK") || start.endsWith("DICM")) {
    throw Object.assign(new Error("DICOM"), { note: "The viewer does not show DICOM. Landmarks are listed." });
  }
  if (start.startsWith("\x1f\x8b")) return "nii.gz";
  if (start.startsWith("NRRD")) return "nrrd";
  return start.startsWith("ObjectType") || start.startsWith("NDims") ? "mha" : "nii";
}

function transform(affine, ijk) {
  return [0, 1, 2].map((row) => affine[row][3] + ijk.reduce((sum, at, axis) => sum + affine[row][axis] * at, 0));
}
