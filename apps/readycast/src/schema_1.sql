-- Times are seconds since 1970, addresses are text, `rule` and `own_deadline` are JSON.
CREATE TABLE channels (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    url TEXT NOT NULL UNIQUE,
    -- The value of an `Authorization` field, for a feed with a password.
    authorization TEXT,
    title TEXT NOT NULL,
    author TEXT NOT NULL DEFAULT '',
    description TEXT NOT NULL DEFAULT '',
    site TEXT,
    image TEXT,
    rule TEXT NOT NULL,
    added_at INTEGER NOT NULL,
    etag TEXT,
    last_modified TEXT,
    refreshed_at INTEGER,
    -- Null: the feed is gone for good.
    next_refresh_at INTEGER,
    failures INTEGER NOT NULL DEFAULT 0,
    problem TEXT,
    -- Moves to another address since `moved_since`.
    moves INTEGER NOT NULL DEFAULT 0,
    moved_since INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX channels_due ON channels (next_refresh_at);

CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    channel INTEGER NOT NULL REFERENCES channels (id) ON DELETE CASCADE,
    guid TEXT NOT NULL,
    title TEXT NOT NULL,
    published INTEGER NOT NULL,
    enclosure TEXT NOT NULL,
    media_type TEXT,
    feed_bytes INTEGER,
    duration_s INTEGER,
    link TEXT,
    chapters TEXT,
    transcript TEXT,
    season INTEGER,
    number INTEGER,
    state INTEGER NOT NULL DEFAULT 0,
    played INTEGER NOT NULL DEFAULT 0,
    played_at INTEGER,
    position_ms INTEGER NOT NULL DEFAULT 0,
    position_at INTEGER,
    own_deadline TEXT,
    -- The agent's transfer, and when it is to be whole.
    job INTEGER,
    deadline INTEGER,
    file TEXT,
    file_bytes INTEGER,
    sha256 TEXT,
    problem TEXT,
    failures INTEGER NOT NULL DEFAULT 0,
    retry_at INTEGER,
    UNIQUE (channel, guid)
) STRICT;

CREATE INDEX episodes_newest ON episodes (published DESC, id DESC);
CREATE INDEX episodes_of_channel ON episodes (channel, published DESC, id DESC);
CREATE INDEX episodes_enclosure ON episodes (channel, enclosure);
-- What lists count: few rows of many.
CREATE INDEX episodes_state ON episodes (state, channel) WHERE state <> 0;
CREATE INDEX episodes_played ON episodes (channel, played);

-- Apart, so that lists do not read past them.
CREATE TABLE notes (
    episode INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
    html TEXT NOT NULL
) STRICT;

CREATE TABLE transfer_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    episode INTEGER,
    started_at INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    entry TEXT NOT NULL
) STRICT;
