// Printing: the scan goes to paper as large as its rings were drawn for, made smaller to fit.

const PAPER_PX = 640; // the width of a sheet of A4 or Letter within its margins, or less

/** Measure an element whenever the page is printed: nothing draws it anew for the paper. */
export function listenForPrint(screen) {
  window.addEventListener("beforeprint", () => {
    const { clientWidth, clientHeight, style } = screen;
    style.setProperty("--width", `${clientWidth}px`);
    style.setProperty("--height", `${clientHeight}px`);
    style.setProperty("--zoom", Math.min(1, PAPER_PX / clientWidth));
  });
}
