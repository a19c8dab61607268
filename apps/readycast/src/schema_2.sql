-- Sync with other podcast apps: what changed since when, and who changed it.

-- Changes have the number of `sync_clock`, which follows the seconds since 1970. Reading raises it, so that a change
-- after it has a greater number than all that was read, however fast one follows the other.
CREATE TABLE sync_clock (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    next INTEGER NOT NULL
) STRICT;
INSERT INTO sync_clock (id, next) VALUES (1, unixepoch());

-- The newest change of each feed's address. `source` is empty for what was done on this device.
CREATE TABLE subscription_changes (
    url TEXT PRIMARY KEY,
    -- The number that the channel has or had.
    channel INTEGER NOT NULL,
    subscribed INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,
    source TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX subscription_changes_since ON subscription_changes (changed_at);

CREATE TRIGGER channel_subscribed AFTER INSERT ON channels BEGIN
    INSERT INTO subscription_changes (url, channel, subscribed, changed_at)
    SELECT NEW.url, NEW.id, 1, max(unixepoch(), next) FROM sync_clock WHERE 1
    ON CONFLICT (url) DO UPDATE SET channel = excluded.channel, subscribed = 1, changed_at = excluded.changed_at, source = '';
END;

CREATE TRIGGER channel_unsubscribed AFTER DELETE ON channels BEGIN
    INSERT INTO subscription_changes (url, channel, subscribed, changed_at)
    SELECT OLD.url, OLD.id, 0, max(unixepoch(), next) FROM sync_clock WHERE 1
    ON CONFLICT (url) DO UPDATE SET channel = excluded.channel, subscribed = 0, changed_at = excluded.changed_at, source = '';
END;

-- Other names of a channel's feed: addresses that it moved from, and those that a server gave it.
CREATE TABLE feed_aliases (
    alias TEXT PRIMARY KEY,
    channel INTEGER NOT NULL REFERENCES channels (id) ON DELETE CASCADE
) STRICT;
CREATE INDEX feed_aliases_of_channel ON feed_aliases (channel);

CREATE TRIGGER channel_moved AFTER UPDATE OF url ON channels WHEN OLD.url IS NOT NEW.url BEGIN
    INSERT OR REPLACE INTO feed_aliases (alias, channel) VALUES (OLD.url, NEW.id);
    DELETE FROM feed_aliases WHERE alias = NEW.url;
    INSERT INTO subscription_changes (url, channel, subscribed, changed_at)
    SELECT OLD.url, OLD.id, 0, max(unixepoch(), next) FROM sync_clock WHERE 1
    ON CONFLICT (url) DO UPDATE SET channel = excluded.channel, subscribed = 0, changed_at = excluded.changed_at, source = '';
    INSERT INTO subscription_changes (url, channel, subscribed, changed_at)
    SELECT NEW.url, NEW.id, 1, max(unixepoch(), next) FROM sync_clock WHERE 1
    ON CONFLICT (url) DO UPDATE SET channel = excluded.channel, subscribed = 1, changed_at = excluded.changed_at, source = '';
END;

-- The newest action on each episode. `kind` 0 is how far it was heard, 1 what became of a file. Also of episodes that
-- are not known here yet (`applied` 0).
CREATE TABLE episode_actions (
    podcast TEXT NOT NULL,
    episode TEXT NOT NULL,
    kind INTEGER NOT NULL,
    guid TEXT,
    action TEXT NOT NULL,
    device TEXT NOT NULL DEFAULT '',
    happened_at INTEGER NOT NULL,
    started INTEGER,
    position INTEGER,
    total INTEGER,
    changed_at INTEGER NOT NULL,
    source TEXT NOT NULL DEFAULT '',
    applied INTEGER NOT NULL DEFAULT 1,
    -- The time and position of the last action that another program sent, as it said them: the same action may come
    -- again, and its time may be ahead of the clock here.
    stated_at INTEGER,
    stated_position INTEGER,
    PRIMARY KEY (podcast, episode, kind)
) STRICT, WITHOUT ROWID;
CREATE INDEX episode_actions_since ON episode_actions (changed_at);
CREATE INDEX episode_actions_pending ON episode_actions (podcast) WHERE applied = 0;

-- An episode that was played to its end is at its length; one that is to be heard anew is `new`.
CREATE TRIGGER episode_heard AFTER UPDATE OF position_ms, played ON episodes
WHEN OLD.position_ms IS NOT NEW.position_ms OR OLD.played IS NOT NEW.played BEGIN
    INSERT INTO episode_actions (podcast, episode, kind, guid, action, happened_at, started, position, total, changed_at)
    SELECT c.url, NEW.enclosure, 0, NEW.guid,
        CASE WHEN NEW.played = 0 AND NEW.position_ms = 0 THEN 'new' ELSE 'play' END,
        unixepoch(),
        CASE WHEN NEW.played = 0 AND NEW.position_ms = 0 THEN NULL ELSE 0 END,
        CASE WHEN NEW.played = 0 AND NEW.position_ms = 0 THEN NULL
             WHEN NEW.position_ms = 0 THEN NEW.duration_s ELSE NEW.position_ms / 1000 END,
        CASE WHEN NEW.played = 0 AND NEW.position_ms = 0 THEN NULL ELSE NEW.duration_s END,
        max(unixepoch(), k.next)
    FROM channels c, sync_clock k WHERE c.id = NEW.channel
    ON CONFLICT (podcast, episode, kind) DO UPDATE SET guid = excluded.guid, action = excluded.action, device = '',
        happened_at = excluded.happened_at, started = excluded.started, position = excluded.position,
        total = excluded.total, changed_at = excluded.changed_at, source = '', applied = 1;
END;

-- Positions are known by addresses: they follow a feed or an episode that gets another one, and are there again when
-- somebody subscribes again.
CREATE TRIGGER actions_follow_feed AFTER UPDATE OF url ON channels WHEN OLD.url IS NOT NEW.url BEGIN
    -- What is known under the new address and newer stays.
    DELETE FROM episode_actions WHERE podcast = OLD.url AND EXISTS (
        SELECT 1 FROM episode_actions n WHERE n.podcast = NEW.url AND n.episode = episode_actions.episode
        AND n.kind = episode_actions.kind AND n.happened_at >= episode_actions.happened_at);
    UPDATE episode_actions SET applied = 0 WHERE podcast = NEW.url;
    UPDATE OR REPLACE episode_actions SET podcast = NEW.url,
        changed_at = (SELECT max(unixepoch(), next) FROM sync_clock) WHERE podcast = OLD.url;
END;
CREATE TRIGGER actions_follow_episode AFTER UPDATE OF enclosure ON episodes WHEN OLD.enclosure IS NOT NEW.enclosure BEGIN
    DELETE FROM episode_actions WHERE podcast = (SELECT url FROM channels WHERE id = NEW.channel)
        AND episode = OLD.enclosure AND EXISTS (
        SELECT 1 FROM episode_actions n WHERE n.podcast = episode_actions.podcast AND n.episode = NEW.enclosure
        AND n.kind = episode_actions.kind AND n.happened_at >= episode_actions.happened_at);
    UPDATE episode_actions SET applied = 0
    WHERE podcast = (SELECT url FROM channels WHERE id = NEW.channel) AND episode = NEW.enclosure;
    UPDATE OR REPLACE episode_actions SET episode = NEW.enclosure,
        changed_at = (SELECT max(unixepoch(), next) FROM sync_clock)
    WHERE podcast = (SELECT url FROM channels WHERE id = NEW.channel) AND episode = OLD.enclosure;
END;
CREATE TRIGGER actions_outlive_channel AFTER DELETE ON channels BEGIN
    UPDATE episode_actions SET applied = 0 WHERE podcast = OLD.url;
END;

-- What was done before this version.
INSERT INTO subscription_changes (url, channel, subscribed, changed_at)
SELECT c.url, c.id, 1, k.next FROM channels c, sync_clock k;
INSERT OR IGNORE INTO episode_actions
    (podcast, episode, kind, guid, action, happened_at, started, position, total, changed_at)
SELECT c.url, e.enclosure, 0, e.guid, 'play', coalesce(max(e.position_at, e.played_at), e.position_at, e.played_at, 0), 0,
    CASE WHEN e.position_ms = 0 THEN e.duration_s ELSE e.position_ms / 1000 END, e.duration_s, k.next
FROM episodes e JOIN channels c ON c.id = e.channel, sync_clock k WHERE e.played = 1 OR e.position_ms > 0;

-- The server that subscriptions and positions are exchanged with; at most one.
CREATE TABLE sync_account (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    server TEXT NOT NULL,
    user_name TEXT NOT NULL,
    -- The value of an `Authorization` field.
    authorization TEXT NOT NULL,
    device TEXT NOT NULL,
    is_nextcloud INTEGER NOT NULL DEFAULT 0,
    -- The server's numbers of what was received last.
    subscriptions_since INTEGER NOT NULL DEFAULT 0,
    actions_since INTEGER NOT NULL DEFAULT 0,
    -- The number of `sync_clock` up to which changes were sent.
    sent_until INTEGER NOT NULL DEFAULT 0,
    synced_at INTEGER,
    next_sync_at INTEGER NOT NULL,
    failures INTEGER NOT NULL DEFAULT 0,
    problem TEXT
) STRICT;

-- Devices of apps that sync with the agent.
CREATE TABLE app_devices (
    id TEXT PRIMARY KEY,
    caption TEXT NOT NULL DEFAULT '',
    kind TEXT NOT NULL DEFAULT 'other',
    seen_at INTEGER NOT NULL
) STRICT;

-- The newest text of feeds that apps read through the agent; null until it was fetched.
CREATE TABLE kept_feeds (
    channel INTEGER PRIMARY KEY REFERENCES channels (id) ON DELETE CASCADE,
    asked_at INTEGER NOT NULL,
    body BLOB
) STRICT;

-- Versions of episodes that apps were given a part of, so that they can tell whether they go on with the same bytes.
CREATE TABLE given_copies (
    episode INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
    edition TEXT NOT NULL,
    -- The digest of the first bytes, in hexadecimal.
    bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL
) STRICT;
