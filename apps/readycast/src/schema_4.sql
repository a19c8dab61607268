-- When the episode was first played after the transfer was asked for; null if it was not.
ALTER TABLE transfer_log ADD COLUMN played_at INTEGER;
CREATE INDEX transfer_log_of_episode ON transfer_log (episode);
-- When a player first stood in the episode.
ALTER TABLE episodes ADD COLUMN first_played_at INTEGER;
-- What the log will keep of the download that runs, in JSON.
ALTER TABLE episodes ADD COLUMN transfer_record TEXT;
