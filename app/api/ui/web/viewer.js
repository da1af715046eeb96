// The viewer: NiiVue with three planes and 3D, and the hand that moves points in the planes.

import { Balls } from "./balls.js";
import { nameOfRange, rangesOf } from "./contrast.js";
import { invert, transform } from "./geometry.js";
import { arrange, depthAt, PLANES, RENDER_TILE } from "./layout.js";
import { Markers } from "./markers.js";
import { Reader } from "./reading.js";

const VIEWS = { axial: 0, coronal: 1, sagittal: 2, all: 3, render: 4 };
const OPTIONS = {
  backColor: [0.03, 0.04, 0.05, 1],
  crosshairWidth: 0, // drawn with the markers, one pixel wide
  meshThicknessOn2D: 0, // so are points in planes
  fontColor: [0.6, 0.65, 0.71, 1],
  fontMinPx: 12,
  dragAndDropEnabled: false,
  showAllOrientationMarkers: true,
  isSliceMM: true, // slices of the scan, seen along world axes, so that points align with oblique scans
  multiplanarShowRender: 1,
  tileMargin: 2,
  meshXRay: 0.8, // points are visible through the surface of the scan
  loadingText: "",
  logLevel: "silent",
};
const SAME_MM = 1e-5; // headers have positions in float32
const RING_PX = 6; // where no 95 % region is known
const [MIN_RING_PX, BALL_PX] = [4, 7];
const HEATMAP = { colormap: "redyell", opacity: 0.6 };
const CLEAR_BELOW = 2; // NiiVue's code: the lower a value is below `cal_min`, the clearer
const STILL_PX = 4; // a shorter drag is a click
const MAX_NAMES = 20; // more are hidden at first, because they overlap

/** A viewer, or null where there is no NiiVue or no WebGL 2. */
export async function makeViewer(canvas, labels, callbacks) {
  if (document.body.dataset.viewer !== "present") return null;
  if (!document.createElement("canvas").getContext("webgl2")) return null;
  const { Niivue } = await import("./niivue.js");
  const nv = new Niivue(OPTIONS);
  // Its keys would turn the view, or show another frame, while one judges.
  nv.keyDownListener = nv.keyUpListener = () => {};
  await nv.attachToCanvas(canvas);
  return new Viewer(nv, canvas, labels, callbacks);
}

class Viewer {
  #landmarks = [];
  #selected = -1;
  #hovered = -1;
  #pressed = null; // {x, y, mark, mm, moved} while a button is down
  #plane = null; // the one clicked or viewed last
  #names = null; // as somebody chose
  #placing = false;
  #abort = null; // of the scan that is being shown

  /**
   * `onSelect` and `onHover` get the index of a landmark in the answer; `onMove` an index and `onPlace` nothing
   * but a new position. Positions are in mm, RAS. `onWindow` gets the name of the range from black to white, or null,
   * and `onGraphics` whether the browser draws.
   */
  constructor(nv, canvas, labels, { onSelect, onHover, onMove, onPlace, onWindow, onGraphics }) {
    Object.assign(this, { nv, canvas, onSelect, onHover, onMove, onPlace, onWindow, onGraphics });
    Object.assign(this, { markers: new Markers(labels), balls: new Balls(nv), reader: new Reader(nv) });
    nv.onIntensityChange = (volume) => onWindow(nameOfRange(volume)); // after a right drag, or a double click
    const draw = nv.drawScene.bind(nv);
    nv.drawScene = () => {
      this.#arrange();
      const result = draw();
      this.#mark();
      return result;
    };
    canvas.addEventListener("pointerdown", (event) => this.#press(event));
    // A hand that rests on the screen, or a second finger, neither moves what the first one holds nor lets it go.
    canvas.addEventListener("pointermove", (event) => event.isPrimary && this.#move(event));
    canvas.addEventListener("pointerup", (event) => event.isPrimary && this.#release(event));
    canvas.addEventListener("pointercancel", (event) => event.isPrimary && this.cancel());
    // Else the browser keeps what it took away, such as while the computer slept.
    canvas.addEventListener("webglcontextlost", (event) => {
      event.preventDefault();
      onGraphics(false); // it may never give it back
    });
    canvas.addEventListener("webglcontextrestored", () => this.#restore());
    canvas.addEventListener("pointerleave", () => this.#hover(null));
    // NiiVue would turn the touch that moves a point into one that moves the slices.
    const guard = (event) => this.#pressed?.mm && event.stopImmediatePropagation();
    for (const kind of ["touchstart", "touchmove"]) canvas.parentElement.addEventListener(kind, guard, { capture: true });
  }

  /** Show a scan of the list without landmarks; `isRead` as for `Reader.read`. */
  async show(entry, isRead) {
    this.clear();
    const { signal } = (this.#abort = new AbortController());
    this.nv.addVolume(await this.reader.read(entry, isRead, signal));
  }

  clear() {
    this.#abort?.abort();
    this.#pressed = null; // its ring is of the scan before
    this.setLandmarks([]);
    this.select(-1);
    for (const volume of [...this.nv.volumes]) this.nv.removeVolume(volume);
  }

  /** Put the scan where the service read it: NiiVue may prefer another form of a NIfTI file, and takes any unit for mm. */
  setGeometry({ affine, spacing_mm }) {
    const [volume] = this.nv.volumes;
    const { affine: before, pixDims } = volume.hdr;
    const [given, read] = [[...affine, spacing_mm].flat(), [...before, [...pixDims].slice(1, 4)].flat()];
    if (given.every((value, index) => Math.abs(value - read[index]) < SAME_MM)) return;
    const at = transform(invert(before), this.crosshair);
    pixDims.splice(1, 3, ...spacing_mm);
    volume.setAffine(affine);
    this.nv.updateGLVolume();
    this.nv.scene.crosshairPos = this.nv.mm2frac(transform(affine, at));
  }

  /** Show the landmarks of a scan, new or changed ones; `select` shows which one is chosen. */
  setLandmarks(landmarks) {
    this.#landmarks = landmarks.map(({ name, status, ras_mm, region95_mm, decided_by }) => ({
      name, status, region: region95_mm, person: decided_by === "person", mm: ras_mm,
    }));
  }

  /** Lay a heatmap over the scan, whose voxels it has; return its highest value with its voxel, {value, ijk}. */
  async showHeatmap(file, signal) {
    // The class of its images is not exported.
    const heatmap = await this.nv.volumes[0].constructor.loadFromFile({ file, ...HEATMAP });
    signal.throwIfAborted();
    const { img, hdr: { dims: [, width, height] } } = heatmap;
    const at = img.reduce((best, value, voxel) => (value > img[best] ? voxel : best), 0);
    if (img[at] > 0) {
      Object.assign(heatmap, { cal_min: img[at] / 2, cal_max: img[at], colormapType: CLEAR_BELOW });
      heatmap.setAffine(this.nv.volumes[0].hdr.affine);
      this.nv.addVolume(heatmap);
    }
    return { value: img[at], ijk: [at % width, Math.floor(at / width) % height, Math.floor(at / width / height)] };
  }

  hideHeatmap() {
    const [, heatmap] = this.nv.volumes;
    if (heatmap) this.nv.removeVolume(heatmap);
  }

  get names() {
    return this.#names ?? this.#landmarks.length <= MAX_NAMES;
  }

  set names(shown) {
    this.#names = shown;
    this.#mark();
  }

  /** Whether the next click in a plane places a point. */
  set placing(placing) {
    this.#placing = placing;
    this.canvas.style.cursor = "crosshair";
  }

  /** Move the crosshair to a landmark; to `near`, in mm, if it has no position. */
  select(index, near = null) {
    this.#selected = index;
    const mm = this.#landmarks[index]?.mm ?? near;
    if (mm) this.nv.scene.crosshairPos = this.nv.mm2frac(mm);
    this.#draw();
  }

  hover(index) {
    this.#hovered = index;
    this.#mark();
  }

  view(name) {
    if (VIEWS[name] < VIEWS.all) this.#plane = VIEWS[name];
    this.nv.setSliceType(VIEWS[name]);
  }

  /** Map the values from black to white; `name` is that of a range in contrast.js. */
  window(name) {
    const [volume] = this.nv.volumes;
    if (!volume) return;
    this.onWindow(name);
    const [from, to] = rangesOf(volume)[name];
    if (volume.cal_min === from && volume.cal_max === to) return;
    Object.assign(volume, { cal_min: from, cal_max: to });
    this.nv.updateGLVolume();
  }

  /** Position of the crosshair. */
  get crosshair() {
    return [...this.nv.frac2mm(this.nv.scene.crosshairPos)].slice(0, 3);
  }

  /** Along x, y and z: steps to the right, upwards and through the plane clicked or viewed last, or the largest. */
  along(steps) {
    const axes = PLANES[this.#plane ?? this.nv.customLayout[0]?.sliceType ?? VIEWS.axial];
    return [0, 1, 2].map((axis) => steps[axes.indexOf(axis)]);
  }

  /** Move the crosshair by voxels along x, y and z, if a scan is there. */
  walk(voxels) {
    if (this.nv.volumes.length) this.nv.moveCrosshairInVox(...voxels);
  }

  /** Give up a drag: the point returns to where it was. */
  cancel() {
    const pressed = this.#pressed;
    this.#pressed = null;
    if (pressed?.mm && pressed.moved) this.#put(pressed.mark.index, pressed.mm);
  }

  /** Send all to the graphics card again, which has nothing left. */
  async #restore() {
    this.balls.forget();
    await this.nv.init();
    this.#draw();
    this.onGraphics(true);
  }

  #draw() {
    this.balls.draw(this.#landmarks, this.#selected, this.#side);
    this.nv.drawScene();
  }

  /** Longest side of the scan in mm. */
  get #side() {
    const [volume] = this.nv.volumes;
    return volume ? Math.max(...[1, 2, 3].map((axis) => volume.hdr.dims[axis] * volume.hdr.pixDims[axis])) : 1;
  }

  #arrange() {
    this.nv.customLayout = [];
    if (!this.nv.volumes.length || this.nv.opts.sliceType !== VIEWS.all) return;
    const [from, to] = [[0, 0, 0], [1, 1, 1]].map((corner) => this.nv.frac2mm(corner));
    const size = [0, 1, 2].map((axis) => Math.abs(to[axis] - from[axis]));
    const { tiles, layout } = arrange(size, this.canvas.clientWidth, this.canvas.clientHeight);
    this.nv.customLayout = tiles;
    this.nv.opts.multiplanarLayout = layout;
  }

  #mark() {
    const scale = this.canvas.width / this.canvas.clientWidth;
    const panes = this.nv.screenSlices.map((tile) => {
      const [left, top, width, height] = tile.leftTopWidthHeight.map((each) => each / scale);
      // A negative width is a slice seen from the other side.
      const box = { x: Math.min(left, left + width), y: top, width: Math.abs(width), height };
      return tile.axCorSag === RENDER_TILE ? this.#inRender(tile, scale, box) : this.#inPlane(tile, scale, box);
    });
    this.markers.draw(panes, [this.#selected, this.#hovered], this.names);
  }

  #inRender(tile, scale, box) {
    const { renderAzimuth, renderElevation } = this.nv.scene;
    const [left, top, width, height] = tile.leftTopWidthHeight.map((each) => each / scale);
    const [m] = this.nv.calculateMvpMatrix(null, tile.leftTopWidthHeight, renderAzimuth, renderElevation);
    const marks = this.#marks(({ mm }) => {
      const clip = [0, 1, 3].map((row) => m[row] * mm[0] + m[4 + row] * mm[1] + m[8 + row] * mm[2] + m[12 + row]);
      const x = left + ((clip[0] / clip[2] + 1) / 2) * width;
      return { x, y: top + ((1 - clip[1] / clip[2]) / 2) * height, radius: BALL_PX, opacity: 1 };
    });
    return { box, cross: null, marks };
  }

  #inPlane(tile, scale, box) {
    const [across, up, through] = PLANES[tile.axCorSag];
    const place = (mm) => {
      const [left, top, width, height] = tile.leftTopWidthHeight.map((each) => each / scale);
      const right = (mm[across] - tile.leftTopMM[0]) / tile.fovMM[0];
      const high = (mm[up] - tile.leftTopMM[1]) / tile.fovMM[1];
      return { x: left + right * width, y: top + (1 - high) * height };
    };
    const marks = this.#marks(({ mm, region }) => {
      const depth = Math.max(this.#side / 40, region ?? 0);
      const thickness = Math.max(...this.nv.volumes[0].hdr.affine[through].slice(0, 3).map(Math.abs)); // of the slice
      const off = Math.max(Math.abs(mm[through] - depthAt(tile, mm[across], mm[up])) - thickness / 2, 0);
      if (off > depth) return null;
      const radius = region === null ? RING_PX : Math.max((region * box.width) / Math.abs(tile.fovMM[0]), MIN_RING_PX);
      const opacity = off ? 0.75 - 0.6 * (off / depth) : 1;
      return { ...place(mm), radius, opacity, plane: tile.axCorSag, tile, sized: region !== null };
    });
    const chosen = marks.find(({ index }) => index === this.#selected);
    return { box, cross: { ...place(this.crosshair), gap: (chosen?.radius ?? RING_PX) + 3 }, marks };
  }

  #marks(place) {
    return this.#landmarks.flatMap((landmark, index) => {
      const placed = landmark.mm && place(landmark);
      return placed ? [{ index, name: landmark.name, status: landmark.status, person: landmark.person, ...placed }] : [];
    });
  }

  /** The tile at a point of the canvas, if it is a plane. */
  #planeAt(x, y) {
    const scale = this.canvas.width / this.canvas.clientWidth;
    const tile = this.nv.screenSlices[this.nv.tileIndex(x * scale, y * scale)];
    return tile && tile.axCorSag !== RENDER_TILE ? tile : null;
  }

  /** The position in mm at a point of a plane; `depth` is its coordinate through the plane, if not that of the slice. */
  #mmAt(tile, x, y, depth = null) {
    const scale = this.canvas.width / this.canvas.clientWidth;
    const [left, top, width, height] = tile.leftTopWidthHeight;
    const [across, up, through] = PLANES[tile.axCorSag];
    const mm = [0, 0, 0];
    mm[across] = tile.leftTopMM[0] + ((x * scale - left) / width) * tile.fovMM[0];
    mm[up] = tile.leftTopMM[1] + (1 - (y * scale - top) / height) * tile.fovMM[1];
    mm[through] = depth ?? depthAt(tile, mm[across], mm[up]);
    return mm;
  }

  #press(event) {
    const [x, y] = [event.offsetX, event.offsetY];
    const tile = this.#planeAt(x, y);
    if (tile) this.#plane = tile.axCorSag;
    if (event.button !== 0 || !event.isPrimary) return;
    const mark = this.#placing ? null : this.markers.at(x, y);
    const grabbed = mark?.tile ? this.#landmarks[mark.index].mm : null;
    this.#pressed = { x, y, mark, mm: grabbed, moved: false };
    if (!grabbed) return;
    // NiiVue gets no mouse event of this press.
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
  }

  #move(event) {
    const pressed = this.#pressed;
    const [x, y] = [event.offsetX, event.offsetY];
    if (pressed) pressed.moved ||= Math.hypot(x - pressed.x, y - pressed.y) >= STILL_PX;
    if (!pressed?.mm) return this.#hover(this.markers.at(x, y));
    if (!pressed.moved) return;
    if (this.#selected !== pressed.mark.index) this.onSelect(pressed.mark.index);
    this.#put(pressed.mark.index, this.#dragged(pressed, x, y));
  }

  #release(event) {
    const pressed = this.#pressed;
    this.#pressed = null;
    if (!pressed) return;
    const tile = this.#planeAt(pressed.x, pressed.y);
    if (pressed.mm && pressed.moved) {
      this.onMove(pressed.mark.index, this.#dragged(pressed, event.offsetX, event.offsetY));
    } else if (this.#placing && tile && !pressed.moved) {
      this.onPlace(this.#mmAt(tile, pressed.x, pressed.y));
    } else if (pressed.mark && !pressed.moved) {
      // A drag in 3D turns the scan; it does not select.
      this.onSelect(pressed.mark.index);
    }
  }

  /** Where a point is dragged to: as far from where it was as the pointer is from where it was pressed. */
  #dragged({ x: fromX, y: fromY, mark, mm }, x, y) {
    return this.#mmAt(mark.tile, mark.x + x - fromX, mark.y + y - fromY, mm[PLANES[mark.plane][2]]);
  }

  #put(index, mm) {
    this.#landmarks[index].mm = mm;
    this.nv.scene.crosshairPos = this.nv.mm2frac(mm);
    this.nv.drawScene();
  }

  #hover(mark) {
    if (this.#placing) return;
    this.canvas.style.cursor = mark ? (mark.tile ? "grab" : "pointer") : "crosshair";
    const index = mark?.index ?? -1;
    if (index === this.#hovered) return;
    this.hover(index);
    this.onHover(index);
  }
}
