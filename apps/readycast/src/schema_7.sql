-- What plans, checks of files and the queue look for: few rows of many.
CREATE INDEX episodes_with_file ON episodes (channel, state) WHERE file IS NOT NULL;
CREATE INDEX episodes_with_deadline ON episodes (channel) WHERE own_deadline IS NOT NULL;
CREATE INDEX episodes_with_problem ON episodes (state) WHERE problem IS NOT NULL;
