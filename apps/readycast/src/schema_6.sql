-- The version of an episode that another app was given last: an app goes on with it without naming it.
CREATE TABLE app_copies (
    episode INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
    edition TEXT NOT NULL
) STRICT;
