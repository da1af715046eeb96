// What a model finds, and what its scans should be, where the table of landmarks will be.

import { element } from "./element.js";
import { getModel } from "./service.js";

/** Describe a model of the list; what takes another call follows. */
export async function describeModel({ name, version, description }) {
  const title = `${name.split("@")[0]} ${version}`; // a folder's name may have its version
  element("about-title").textContent = title;
  element("about-text").textContent = `${description.replace(/\.?$/, ".")}`;
  element("about-scan").textContent = "";
  element("about-card").hidden = element("about-sample").hidden = true;
  try {
    const model = await getModel(name);
    if (element("about-title").textContent !== title) return; // another one by now
    const spacing = [...new Set(model.spacing_mm)].join(" × ");
    const whole = model.tile_shape === "whole" ? " The network sees the whole scan at once." : "";
    element("about-scan").textContent =
      `Scans are resampled to ${spacing} mm; their voxels should not be much larger. Any orientation will do.${whole}`;
    element("about-sample").hidden = !model.sample;
    element("about-sample").querySelector("a").href = model.sample ?? "";
    element("about-license").textContent = `Licence: ${model.license}`;
    element("about-words").textContent = model.card ?? "";
    element("about-card").hidden = !model.card;
  } catch {
    // The list said what matters.
  }
}
