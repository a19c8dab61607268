// Keeps a page of the agent up to date. Without this script the page works too: its forms are ordinary forms,
// and reloading shows what is new.
"use strict";

const live = document.getElementById("live");
const problem = document.getElementById("problem");
const said = document.getElementById("said");

function report(text) {
  problem.textContent = text;
  problem.hidden = text === "";
}

// The first of `at` and its following siblings that is of the same kind as `next`, and has no id.
function alike(at, next) {
  while (at && (at.id || at.nodeName !== next.nodeName)) {
    at = at.nextSibling;
  }
  return at;
}

// Makes `old` like `fresh`, and leaves alone what is the same: what has the focus keeps it, what is written in a
// field stays, what was opened stays open. Elements with an id are recognised by it.
function update(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) {
      old.removeAttribute(name);
    }
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) {
      old.setAttribute(name, value);
    }
  }
  const kept = new Set([...fresh.children].map((child) => child.id));
  // A list of thousands is gone through once.
  const named = new Map();
  for (const child of [...old.children]) {
    if (child.id && !kept.has(child.id)) {
      child.remove();
    } else if (child.id) {
      named.set(child.id, child);
    }
  }
  let at = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const known = next.id ? named.get(next.id) : alike(at, next);
    const same = known?.nodeName === next.nodeName ? known : null;
    if (!same) {
      old.insertBefore(next, at);
      continue;
    }
    if (same === at) {
      at = at.nextSibling;
    } else if (old.moveBefore) {
      old.moveBefore(same, at);
    } else {
      old.insertBefore(same, at);
    }
    if (same.nodeType === Node.ELEMENT_NODE) {
      update(same, next);
    } else if (same.data !== next.data) {
      same.data = next.data;
    }
  }
  while (at) {
    const after = at.nextSibling;
    at.remove();
    at = after;
  }
}

// What a screen reader is told: states that changed, not every byte.
function sayings() {
  return new Map([...live.querySelectorAll("[data-said]")].map((part) => [part.id, part.dataset.said]));
}

function show(html) {
  const before = sayings();
  const fresh = live.cloneNode(false);
  fresh.append(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
  const focused = document.activeElement;
  update(live, fresh);
  // Not every browser has moveBefore; without it, what is moved loses the focus.
  if (focused !== document.activeElement) {
    const again = live.contains(focused) ? focused : focused.id && document.getElementById(focused.id);
    again?.focus?.({ preventScroll: true });
  }
  // The player looks at what is here now.
  live.dispatchEvent(new Event("update"));
  const news = [...sayings()].filter(([id, text]) => before.get(id) !== text);
  if (news.length > 0) {
    said.textContent = news.map(([, text]) => text).join(". ");
  }
}

// A page that nobody sees costs nothing.
let source = null;
const AGAIN_MS = 2_000;
const AGAIN_MS_MAX = 60_000;
// How long until the page asks again: longer after each answer that is none.
let againMs = AGAIN_MS;

// Browsers differ in whether and when they ask again for updates that broke off, so the page asks itself.
async function tryAgain() {
  if (source !== null || document.hidden) {
    return;
  }
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) {
      report(
        answer.status === 404
          ? "This page is no longer there: what it shows was removed, or the page has another address now. `cedos page` opens it."
          : "Cedos cannot show this page now, so this may be out of date. It is asked again.",
      );
      setTimeout(tryAgain, againMs);
      againMs = Math.min(2 * againMs, AGAIN_MS_MAX);
      return;
    }
    follow();
  } catch {
    report("Cedos does not answer, so this may be out of date. `cedos page` starts it.");
    setTimeout(tryAgain, AGAIN_MS);
  }
}

function follow() {
  if (document.hidden) {
    source?.close();
    source = null;
    return;
  }
  if (source !== null) {
    return;
  }
  const opened = new EventSource(live.dataset.updates);
  source = opened;
  opened.onopen = () => {
    againMs = AGAIN_MS;
    report("");
  };
  opened.onmessage = (event) => show(JSON.parse(event.data));
  opened.onerror = () => {
    opened.close();
    if (source === opened) {
      source = null;
      setTimeout(tryAgain, AGAIN_MS / 4);
    }
  };
}

async function send(event) {
  const form = event.target;
  // What leads to another page is the browser's to send.
  if (form.method !== "post" || "navigates" in form.dataset) {
    return;
  }
  event.preventDefault();
  const fields = new URLSearchParams(new FormData(form, event.submitter));
  try {
    const answer = await fetch(form.action, { method: "POST", body: fields, redirect: "manual" });
    if (answer.type === "opaqueredirect") {
      report("");
      if (event.submitter?.dataset.done) {
        said.textContent = event.submitter.dataset.done;
      }
      const details = form.closest("details");
      if (details) {
        // What is closed can have no focus.
        details.querySelector("summary").focus();
        details.open = false;
      }
      // What was changed is shown at once.
      source?.close();
      source = null;
      follow();
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    report(page.getElementById("reason")?.textContent ?? "That did not work: the page may have another address now. `cedos page` opens it.");
  } catch {
    report("Cedos does not answer. `cedos page` starts it.");
  }
}

if (live) {
  document.addEventListener("visibilitychange", follow);
  document.addEventListener("submit", send);
  follow();
}
