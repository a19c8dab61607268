//! What `cedos get --dry-run` prints.

use std::time::Duration;

use d2tp_links::LinkKind;
use d2tp_sched::format_duration;
use jiff::{SignedDuration, Unit, Zoned};

use cedos_agent::fetch::deadline_text::describe_deadline;
use cedos_agent::fetch::report::human_bytes;
use cedos_agent::fetch::transfer::DryRunPlan;

/// The text of a deadline this many seconds from now: `18:00 (in 6 hours)`.
fn described_deadline(left_s: f64) -> String {
    let now = Zoned::now();
    let left = SignedDuration::try_from_secs_f64(left_s).unwrap_or_default();
    let at = now.timestamp().saturating_add(left);
    let at = at.ok().and_then(|at| at.round(Unit::Second).ok());
    describe_deadline(at.unwrap_or_else(|| now.timestamp()), &now)
}

/// One screen for people.
pub fn render(plan: &DryRunPlan) -> String {
    let mut lines = vec![format!("{} → {} ({})", plan.url, plan.file, plan.mode)];
    let mut say = |label: &str, text: String| lines.push(format!("  {label:9} {text}"));
    if let Some(refused) = &plan.refused {
        say("Refused", format!("as it is, because {refused}"));
    }
    let forecast = &plan.forecast;
    let guess = if forecast.size_is_a_guess {
        format!("unknown, {} assumed", human_bytes(forecast.remaining_bytes))
    } else {
        human_bytes(plan.length.unwrap_or(forecast.remaining_bytes))
    };
    say("Size", format!("{guess} ({})", plan.length_from));
    if plan.held_bytes > 0 {
        let held = human_bytes(plan.held_bytes);
        say("Held", format!("{held} of an earlier run"));
    }
    if plan.resumable == Some(false) {
        let text = "no: the server names no version of the object, so an interruption means \
            starting from zero";
        say("Resumes", text.into());
    }
    if let Some(proxy) = &plan.proxy {
        say("Proxy", format!("{proxy} (--no-prox goes without it)"));
    }
    // The loopback link says nothing to people, unless the download uses it.
    let shown = (plan.links.iter()).filter(|link| link.usable || link.kind != LinkKind::Loopback);
    for link in shown {
        let usable = if link.usable { "" } else { ", not usable now" };
        let (name, kind, why) = (&link.name, link.kind, &link.class_because);
        say(
            "Link",
            format!("{name}: {kind}, {} ({why}){usable}", link.class),
        );
    }
    match (&plan.link, &plan.reason) {
        (None, Some(_)) => {
            let unblocks = plan.unblocks.as_deref().unwrap_or("nothing known");
            let why = &plan.why;
            say("Now", format!("waits: {why}"));
            say("Ends with", unblocks.replace(" | ", ", or "));
        }
        _ => say("Now", format!("starts: {}", plan.why)),
    }
    let needed = match forecast.free_needed_s {
        Some(needed_s) => format!(
            "{} on free networks at {}/s",
            match needed_s < 1.0 {
                true => "under 1 s".to_owned(),
                false => {
                    let needed = Duration::from_secs_f64(needed_s.min(1e9));
                    format!("about {}", format_duration(needed))
                }
            },
            human_bytes(forecast.free_rate_bytes_per_s as u64)
        ),
        None => "no free network is up".into(),
    };
    match plan.deadline_s {
        Some(deadline_s) => {
            let at = described_deadline(deadline_s);
            // Whether that is in time is what is promised.
            let chance = match (plan.promise, forecast.feasible) {
                (Some(_), _) => "",
                (None, Some(true)) => "feasible; ",
                (None, Some(false)) => "not feasible with the networks that are up now; ",
                (None, None) => "",
            };
            say("Deadline", format!("{at}; {chance}{needed}"));
        }
        None => say("Deadline", format!("none; {needed}")),
    }
    match plan.promise {
        Some(promise) => say("Promise", promise.describe()),
        None if forecast.metered_bytes_worst == 0 => say("Metered", "nothing".into()),
        None => say(
            "Metered",
            format!(
                "{} expected, {} at worst",
                human_bytes(forecast.metered_bytes_expected),
                human_bytes(forecast.metered_bytes_worst)
            ),
        ),
    }
    if let Some(probe) = &plan.probe {
        let bytes = human_bytes(probe.bytes);
        let when = match probe.is_certain {
            true => ": free networks alone may miss the deadline",
            false => ", if free networks turn out too slow for the deadline",
        };
        let link = &probe.link;
        say(
            "Measures",
            format!("{link} with up to {bytes} of mobile data{when}"),
        );
    }
    lines.join("\n")
}
