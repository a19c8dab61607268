// The player of an episode. Without this script the browser's own controls play the episode, but its position is not
// stored.
"use strict";

const STORE_EVERY_MS = 10_000;
const BACK_S = 15;
const FORWARD_S = 30;

const player = document.getElementById("player");

function startPlayer() {
  const audio = document.getElementById("audio");
  const speed = document.getElementById("speed");
  const sleep = document.getElementById("sleep");
  const state = document.getElementById("player-state");
  const live = document.getElementById("live");
  let storedAt = 0;
  let storedMs = Number(player.dataset.position);
  let sleepTimer = 0;
  // Where to go on when the file is loaded, in seconds.
  let resumeAt = storedMs / 1000;
  // Until the position is restored, the beginning is nobody's choice.
  let isRestored = false;
  // The last position, in seconds: Firefox forgets it when it cannot decode.
  let lastAt = 0;
  // What is to be played once there is something to play.
  let isAwaited = false;
  let hasFailed = false;
  let failures = 0;
  // Whether the agent has not heard the last position: it was killed, or is being replaced.
  let isUnheard = false;
  // The tag of the bytes that are played.
  let edition = presentEdition();

  function show(text) {
    if (state.textContent !== text) {
      state.textContent = text;
    }
  }

  // How much of the episode the agent can give: "nothing", "beginning" or "whole".
  function playable() {
    return document.getElementById("state")?.dataset.playable ?? "whole";
  }

  // The tag of the bytes that the agent can give.
  function presentEdition() {
    return document.getElementById("state")?.dataset.edition ?? "";
  }

  function store() {
    if (!isRestored || !Number.isFinite(audio.duration)) {
      return;
    }
    const positionMs = Math.round(audio.currentTime * 1000);
    if (positionMs === storedMs && !isUnheard) {
      return;
    }
    storedMs = positionMs;
    storedAt = Date.now();
    const fields = { position_ms: positionMs, duration_ms: Math.round(audio.duration * 1000) };
    const fail = (text) => {
      isUnheard = true;
      show(text);
    };
    // It arrives even if this page is closed meanwhile.
    fetch(player.dataset.store, { method: "POST", body: new URLSearchParams(fields), keepalive: true })
      .then((answer) => {
        if (!answer.ok) {
          fail("The position is not stored: the page may have another address now. `cedos page` opens it.");
        } else if (isUnheard) {
          isUnheard = false;
          show("");
        }
      })
      .catch(() => fail("The position is not stored: Cedos does not answer."));
  }

  // Plays the next episode of the list, on its own page.
  function playNext() {
    const next = document.getElementById("next");
    if (next) {
      store();
      location.assign(next.href);
    }
  }

  function seek(to) {
    audio.currentTime = Math.max(0, Math.min(to, audio.duration || to));
  }

  function play() {
    // A browser that lets nobody but its user begin shows its own button.
    audio.play().catch(() => {});
  }

  function restore() {
    // After a failure the length may first be that of what came before it.
    if (isRestored || (failures > 0 && resumeAt >= audio.duration)) {
      return;
    }
    if (resumeAt > 0 && resumeAt < audio.duration) {
      audio.currentTime = resumeAt;
    }
    lastAt = audio.currentTime;
    isRestored = true;
  }

  function notePosition() {
    if (isRestored && (audio.error === null || audio.currentTime > 0)) {
      lastAt = audio.currentTime;
    }
  }

  function load() {
    hasFailed = false;
    isRestored = false;
    edition = presentEdition();
    const query = new URLSearchParams();
    if (edition !== "") {
      // So the agent never gives a part of other bytes.
      query.set("edition", edition);
    }
    if (failures > 0) {
      // So the browser does not play again what was cut off (Firefox).
      query.set("again", failures);
    }
    audio.src = `${player.dataset.audio}?${query}`;
    audio.playbackRate = Number(speed.value);
  }

  // Which chapter and which passage is being played, for eyes and screen readers.
  function markChapter() {
    for (const list of document.querySelectorAll(".chapters, .transcript")) {
      markPresent([...list.querySelectorAll("[data-start]")]);
    }
  }

  function markPresent(chapters) {
    const present = chapters.findLast((chapter) => Number(chapter.dataset.start) <= audio.currentTime);
    for (const chapter of chapters) {
      if (chapter === present && isRestored) {
        chapter.setAttribute("aria-current", "true");
      } else {
        chapter.removeAttribute("aria-current");
      }
    }
  }

  // A transcript that came after the page is put into it.
  async function showTranscript() {
    const place = document.getElementById("transcript");
    if (!place.hidden || document.getElementById("state")?.dataset.transcript !== "here") {
      return;
    }
    try {
      const answer = await fetch(location.href);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById("transcript");
      if (fresh && !fresh.hidden && place.hidden) {
        place.replaceChildren(...fresh.childNodes);
        place.hidden = false;
      }
    } catch {
      // It is looked at again when something changes.
    }
  }

  // What of the episode is here has changed, or may have.
  function look() {
    showTranscript();
    const part = playable();
    player.hidden = part === "nothing";
    if (part === "nothing") {
      return;
    }
    // If a download began anew, what was loaded is of a file that is no more.
    if (!audio.hasAttribute("src") || hasFailed || edition !== presentEdition()) {
      // A person may have sought after it failed.
      notePosition();
      resumeAt = isRestored ? lastAt : resumeAt;
      isAwaited ||= audio.hasAttribute("src") && !audio.paused;
      load();
    }
    markChapter();
    if (isAwaited) {
      isAwaited = false;
      play();
    }
    if (isUnheard) {
      store();
    }
  }

  const skips = {
    seekbackward: (details) => seek(audio.currentTime - (details?.seekOffset ?? BACK_S)),
    seekforward: (details) => seek(audio.currentTime + (details?.seekOffset ?? FORWARD_S)),
  };

  if (audio.readyState >= HTMLMediaElement.HAVE_METADATA) {
    restore();
  }
  for (const event of ["loadedmetadata", "durationchange"]) {
    audio.addEventListener(event, restore);
  }
  audio.addEventListener("timeupdate", () => {
    markChapter();
    notePosition();
    // Who hears a file that is shorter than the position has begun anew.
    isRestored ||= !audio.paused && audio.currentTime >= STORE_EVERY_MS / 1000;
    if (!audio.paused && Date.now() - storedAt >= STORE_EVERY_MS) {
      store();
    }
  });
  audio.addEventListener("seeking", notePosition);
  for (const event of ["ended", "seeked"]) {
    audio.addEventListener(event, () => {
      // A person sought, or heard the end; it counts also where the old position could not be restored.
      isRestored = true;
      notePosition();
    });
  }
  for (const event of ["pause", "ended", "seeked"]) {
    audio.addEventListener(event, store);
  }
  audio.addEventListener("ended", () => {
    if (sleep.value !== "episode") {
      playNext();
    }
  });
  audio.addEventListener("waiting", () => {
    if (playable() === "beginning") {
      show("Waiting for more of the episode.");
    }
  });
  for (const event of ["playing", "canplay"]) {
    audio.addEventListener(event, () => show(""));
  }
  audio.addEventListener("error", () => {
    if (isRestored) {
      resumeAt = lastAt;
    }
    isAwaited ||= !audio.paused;
    hasFailed = true;
    failures += 1;
    show(
      playable() === "whole"
        ? "This browser cannot play the file, or Cedos has stopped. Playing goes on when it runs again."
        : "The download does not go on, so there is no more to play. Playing goes on when it does.",
    );
  });
  audio.addEventListener("pause", () => {
    // Who pauses what failed does not wait for it.
    isAwaited = false;
  });
  window.addEventListener("pagehide", store);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      store();
    }
  });

  document.getElementById("back").addEventListener("click", () => skips.seekbackward());
  document.getElementById("forward").addEventListener("click", () => skips.seekforward());
  speed.addEventListener("change", () => {
    audio.playbackRate = Number(speed.value);
  });
  sleep.addEventListener("change", () => {
    clearTimeout(sleepTimer);
    const minutes = Number(sleep.value);
    if (minutes > 0) {
      sleepTimer = setTimeout(() => {
        audio.pause();
        sleep.value = "0";
      }, minutes * 60_000);
    }
  });
  document.addEventListener("click", (event) => {
    const chapter = event.target.closest("[data-start]");
    if (chapter && playable() !== "nothing") {
      seek(Number(chapter.dataset.start));
      play();
    }
  });
  live.addEventListener("submit", (event) => {
    const action = event.submitter?.value;
    if (action === "play" || action === "not-wanted") {
      isAwaited = action === "play";
    }
  });
  live.addEventListener("update", look);
  document.getElementById("controls").hidden = false;
  if (location.hash === "#play") {
    // A reload is no wish to play.
    history.replaceState(null, "", location.pathname + location.search);
    isAwaited = true;
    look();
  }

  if ("mediaSession" in navigator) {
    navigator.mediaSession.metadata = new MediaMetadata({ title: player.dataset.title, artist: player.dataset.channel });
    const handlers = {
      play: () => audio.play(),
      pause: () => audio.pause(),
      seekto: (details) => seek(details.seekTime),
      nexttrack: playNext,
      ...skips,
    };
    for (const [action, handler] of Object.entries(handlers)) {
      try {
        navigator.mediaSession.setActionHandler(action, handler);
      } catch {
        // This browser has no such key.
      }
    }
  }
}

if (player) {
  startPlayer();
}
