//! `cedos agent` as a program: its queue, its links, and the services of a desktop beside it.

mod browser;
mod credential_files;
mod home;
mod links;
mod mirrors;
mod networks;
mod on_demand;
mod page;
mod podcast_addresses;
mod podcast_apps;
mod podcast_apps_scene;
mod podcast_conditions;
mod podcast_kills;
mod podcast_listener;
mod podcast_scene;
mod podcast_search;
mod podcast_sync;
mod podcasts;
mod podcasts_browser;
mod podcasts_lasting;
mod podcasts_log;
mod podcasts_page;
mod ports;
mod queue;
mod recurring;
mod short_queues;
