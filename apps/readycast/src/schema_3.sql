-- The host of the feed if a person subscribed to it while it was at an address of a local network. Null for all others,
-- and for hosts that are local by what is written.
ALTER TABLE channels ADD COLUMN local_host TEXT;

-- Items of the feed that are no episodes here, by reason, as JSON.
ALTER TABLE channels ADD COLUMN skipped TEXT;
