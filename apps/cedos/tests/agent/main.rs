//! `cedos agent` as a program: its queue, its links, and the services of a desktop beside it.

mod browser;
mod links;
mod networks;
mod on_demand;
mod page;
mod podcast_scene;
mod podcasts;
mod podcasts_browser;
mod podcasts_page;
mod queue;
