-- The place that a person gave the episode in the order of hearing; null if none did.
ALTER TABLE episodes ADD COLUMN up_next INTEGER;
CREATE INDEX episodes_up_next ON episodes (up_next) WHERE up_next IS NOT NULL;
-- What was begun and not heard to its end, as the library's page shows it first.
CREATE INDEX episodes_begun ON episodes (position_at) WHERE position_ms > 0 AND played = 0;
