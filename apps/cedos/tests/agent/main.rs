//! `cedos agent` as a program: its queue, its links, and the services of a desktop beside it.

mod browser;
mod links;
mod networks;
mod on_demand;
mod page;
mod podcasts;
mod podcasts_log;
mod podcasts_page;
mod queue;
