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
  const problem = document.getElementById("player-problem");
  let storedAt = 0;
  let storedMs = Number(player.dataset.position);
  let sleepTimer = 0;
  // Until the position is restored, the beginning is nobody's choice.
  let isRestored = false;

  function store() {
    if (!isRestored || !Number.isFinite(audio.duration)) {
      return;
    }
    const positionMs = Math.round(audio.currentTime * 1000);
    if (positionMs === storedMs) {
      return;
    }
    storedMs = positionMs;
    storedAt = Date.now();
    const fields = { position_ms: positionMs, duration_ms: Math.round(audio.duration * 1000) };
    // It arrives even if this page is closed meanwhile.
    fetch(player.dataset.store, { method: "POST", body: new URLSearchParams(fields), keepalive: true })
      .then((answer) => {
        problem.textContent = answer.ok ? "" : "The position is not stored: this link may have been replaced.";
      })
      .catch(() => {
        problem.textContent = "The position is not stored: the agent does not answer.";
      });
  }

  function seek(to) {
    audio.currentTime = Math.max(0, Math.min(to, audio.duration || to));
  }

  function restore() {
    if (isRestored) {
      return;
    }
    const position = Number(player.dataset.position) / 1000;
    if (position > 0 && position < audio.duration) {
      audio.currentTime = position;
    }
    isRestored = true;
  }

  const skips = {
    seekbackward: (details) => seek(audio.currentTime - (details?.seekOffset ?? BACK_S)),
    seekforward: (details) => seek(audio.currentTime + (details?.seekOffset ?? FORWARD_S)),
  };

  if (audio.readyState >= HTMLMediaElement.HAVE_METADATA) {
    restore();
  }
  audio.addEventListener("loadedmetadata", restore);
  audio.addEventListener("timeupdate", () => {
    if (!audio.paused && Date.now() - storedAt >= STORE_EVERY_MS) {
      store();
    }
  });
  for (const event of ["pause", "ended", "seeked"]) {
    audio.addEventListener(event, store);
  }
  audio.addEventListener("error", () => {
    problem.textContent = "This browser cannot play the file, or the file was removed. Reload the page to see.";
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
  for (const chapter of player.querySelectorAll("[data-start]")) {
    chapter.addEventListener("click", () => {
      seek(Number(chapter.dataset.start));
      audio.play().catch(() => {});
    });
  }
  document.getElementById("controls").hidden = false;

  if ("mediaSession" in navigator) {
    navigator.mediaSession.metadata = new MediaMetadata({ title: player.dataset.title, artist: player.dataset.channel });
    const handlers = {
      play: () => audio.play(),
      pause: () => audio.pause(),
      seekto: (details) => seek(details.seekTime),
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
