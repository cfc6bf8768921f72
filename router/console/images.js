// Images that go with a prompt: chosen, shown small, removed. They leave the page as data URLs alone.

import { announce, byId, h, plural, setAttribute, setText } from "./dom.js";

const MOST = 8;
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SIDE = 112; // pixels of a thumbnail, twice those of the page

export class PromptImages {
  constructor() {
    this.chosen = []; // {name, url, thumb}
    this.reason = "";
    this.problem = ""; // of the files that were chosen last
    this.input = byId("images");
    this.button = byId("add-images");
    this.button.addEventListener("click", () => this.input.click());
    this.input.addEventListener("change", () => this.add([...this.input.files]));
  }

  get urls() {
    return this.chosen.map(({ url }) => url);
  }

  /** reason: why none can be sent now; "" = they can. */
  allow(reason) {
    this.reason = reason;
    this.button.disabled = reason !== "";
    setText(byId("images-note"), reason || this.problem || "PNG, JPEG, WebP or GIF.");
    const isAmiss = this.problem || (reason && this.chosen.length);
    setAttribute(byId("images-note"), "class", isAmiss ? "failure" : "muted");
  }

  async add(files) {
    this.input.value = ""; // so that the same file can be chosen again
    this.problem = "";
    for (const file of files) {
      const image = await read(file);
      if (!image) this.problem = `${file.name} is no PNG, JPEG, WebP or GIF.`;
      else if (this.chosen.length >= MOST) this.problem = `At most ${MOST} images at once.`;
      else this.chosen.push(image);
    }
    this.show();
    announce(`${this.problem} ${plural(this.chosen.length, "image")} chosen`.trim());
  }

  remove(image) {
    this.chosen = this.chosen.filter((other) => other !== image);
    this.problem = "";
    this.show();
    (byId("thumbs").querySelector("button") ?? (this.reason ? byId("prompt") : this.button)).focus();
    announce(`${plural(this.chosen.length, "image")} chosen`);
  }

  show() {
    byId("thumbs").replaceChildren(...this.chosen.map((image) => this.item(image)));
    this.allow(this.reason);
  }

  item(image) {
    const remove = { type: "button", class: "small", "aria-label": `Remove ${image.name}`, onclick: () => this.remove(image) };
    return h("li", {}, image.thumb, h("button", remove, "×"));
  }
}

/** {name, url, thumb} of a file; null where it is no image that the server reads. */
async function read(file) {
  if (!KINDS.includes(file.type)) return null;
  try {
    const bitmap = await createImageBitmap(file);
    return { name: file.name, url: await dataUrl(file), thumb: thumbOf(bitmap, file.name) };
  } catch {
    return null;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** The whole image in a square; the page's policy lets no image of a data URL in. */
function thumbOf(bitmap, name) {
  const thumb = h("canvas", { width: SIDE, height: SIDE, role: "img", "aria-label": name, title: name });
  const scale = SIDE / Math.max(bitmap.width, bitmap.height);
  const [width, height] = [bitmap.width * scale, bitmap.height * scale];
  thumb.getContext("2d").drawImage(bitmap, (SIDE - width) / 2, (SIDE - height) / 2, width, height);
  bitmap.close();
  return thumb;
}
