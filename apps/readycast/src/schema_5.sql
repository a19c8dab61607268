-- The file system that the file was seen on; null if it was not.
ALTER TABLE episodes ADD COLUMN file_system TEXT;
-- Folders of episodes: the file system of each, and the one that its mount point is on.
CREATE TABLE episode_folders (
    path TEXT PRIMARY KEY,
    file_system TEXT NOT NULL,
    above TEXT NOT NULL
) STRICT;
-- Other enclosures of the episode (`podcast:alternateEnclosure`), as JSON.
ALTER TABLE episodes ADD COLUMN alternates TEXT;
-- The enclosure that was chosen for the download, as JSON.
ALTER TABLE episodes ADD COLUMN chosen TEXT;
