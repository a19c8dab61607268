//! `cedos vpn` between real network namespaces, with programs that know nothing of it. Each test is skipped where the
//! system forbids such namespaces.

mod evening;
mod hostile;
mod programs;
mod radio;
mod rules;
mod scene;
mod tunnel;
