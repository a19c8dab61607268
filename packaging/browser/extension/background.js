// Hands downloads of the browser over to the Cedos agent, through `cedos browser host`.
"use strict";

const HOST = "io.github.cedos";
const api = globalThis.browser ?? globalThis.chrome;

async function ask(message) {
  const answer = await api.runtime.sendNativeMessage(HOST, message);
  if (!answer?.ok) {
    throw new Error(answer?.text ?? "the agent does not answer");
  }
  return answer;
}

// The referrer as browsers send it by default (strict-origin-when-cross-origin): to another origin only its own
// origin, nothing from https to http, never a fragment or credentials.
function referrerFor(url, page) {
  if (!/^https?:/.test(page ?? "")) {
    return undefined;
  }
  const [to, from] = [new URL(url), new URL(page)];
  if (from.protocol === "https:" && to.protocol === "http:") {
    return undefined;
  }
  if (from.origin !== to.origin) {
    return `${from.origin}/`;
  }
  from.hash = from.username = from.password = "";
  return from.href;
}

// What the browser would send, so that a download behind a login is the same.
async function handOver(url, referrer) {
  const cookies = await api.cookies.getAll({ url });
  return ask({
    do: "download",
    url,
    referrer: referrerFor(url, referrer),
    cookies: cookies.map(({ name, value }) => `${name}=${value}`).join("; ") || undefined,
    user_agent: navigator.userAgent,
  });
}

function badge(text, title) {
  api.action.setBadgeText({ text });
  api.action.setTitle({ title: title ?? "Show the transfers of Cedos" });
}

async function isOn() {
  const { on = true } = await api.storage.local.get("on");
  return on;
}

// The browser goes on with a download that the agent does not take.
api.downloads.onCreated.addListener(async (item) => {
  const url = item.finalUrl || item.url;
  if (!/^https?:/.test(url) || item.state !== "in_progress" || item.incognito || !(await isOn())) {
    return;
  }
  await api.downloads.pause(item.id).catch(() => {});
  try {
    await handOver(url, item.referrer);
    badge("✓");
  } catch (error) {
    badge("!", `The browser downloads by itself: ${error.message}`);
    await api.downloads.resume(item.id).catch(() => {});
    return;
  }
  // It may be complete already.
  await api.downloads.cancel(item.id).catch(() => {});
  await api.downloads.removeFile(item.id).catch(() => {});
  await api.downloads.erase({ id: item.id });
});

api.action.onClicked.addListener(async () => {
  try {
    const { link } = await ask({ do: "page" });
    await api.tabs.create({ url: link });
  } catch (error) {
    badge("!", error.message);
  }
});

api.runtime.onInstalled.addListener(async () => {
  await api.contextMenus.removeAll();
  api.contextMenus.create({ id: "link", contexts: ["link"], title: "Download with Cedos" });
  const checked = await isOn();
  await api.storage.local.set({ on: checked });
  api.contextMenus.create({ id: "on", contexts: ["action"], type: "checkbox", title: "Hand downloads over to Cedos", checked });
});

api.contextMenus.onClicked.addListener(async (info, tab) => {
  if (info.menuItemId === "on") {
    await api.storage.local.set({ on: info.checked });
    return;
  }
  try {
    await handOver(info.linkUrl, tab?.url);
    badge("✓");
  } catch (error) {
    badge("!", error.message);
  }
});
