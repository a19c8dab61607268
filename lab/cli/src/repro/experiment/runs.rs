//! The runs of a row, and the metrics of each.
//!
//! In the simulator as many run at once as there are processors, and a scenario that several cases
//! share runs once. On real sockets one runs after another, or all variants of a case at once if
//! the row says so.

use super::cases::{NamedValues, json_of, resolve};
use super::row_file::{RowExperiment, RowVariant};
use super::source_files::SourceFiles;
use super::template;
use crate::repro::emulated::{D2TP, StartedLabRun, TUNNEL};
use crate::repro::measured::by_bench;
use crate::repro::runner::RowVenue;
use anyhow::{Context, anyhow, ensure};
use cedos_lab_scenario::Scenario;
use cedos_lab_sim::{EndpointConfigs, run_between};
use d2tp_session::{CongestionKind, EndpointConfig};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use toml::Table;

/// The results of a case.
#[derive(Clone, Debug)]
pub struct CaseRuns {
    /// The values of the case's names.
    pub named: NamedValues,
    /// Report and metrics of each variant that was run.
    pub metrics: BTreeMap<String, Value>,
}

/// One run that is planned.
pub struct PlannedRun<'a> {
    case: usize,
    /// The variant that is run.
    pub variant: &'a RowVariant,
    /// The values of the names in this run.
    pub named: NamedValues,
    /// The text of the scenario; empty if the bench needs none.
    pub scenario: String,
    ends: Table,
}

/// The reports of the runs, in their order.
pub fn reports(
    experiment: &RowExperiment,
    venue: RowVenue,
    files: &SourceFiles,
    planned: &[PlannedRun<'_>],
) -> anyhow::Result<Vec<Value>> {
    match venue {
        RowVenue::Sim => simulated(planned, files),
        RowVenue::Lab => on_real_sockets(experiment, planned, files, D2TP),
        RowVenue::Tunnel => on_real_sockets(experiment, planned, files, TUNNEL),
    }
}

/// Makes `reports` carry out every variant in every case where it is wanted, and computes the
/// metrics of each run.
pub fn carried_out(
    experiment: &RowExperiment,
    cases: Vec<NamedValues>,
    seed: Option<u32>,
    reports: impl FnOnce(&[PlannedRun<'_>]) -> anyhow::Result<Vec<Value>>,
) -> anyhow::Result<Vec<CaseRuns>> {
    let mut planned = Vec::new();
    let mut done = Vec::new();
    for (case, mut named) in cases.into_iter().enumerate() {
        let without = named.clone();
        resolve(&experiment.computed, &mut named, true)?;
        for variant in &experiment.variants {
            let wanted = match &variant.condition {
                Some(condition) => template::is_true(condition, &Value::Object(named.clone()))
                    .with_context(|| format!("variant {}", variant.name))?,
                None => true,
            };
            if wanted {
                planned.push(plan(experiment, case, variant, seed, without.clone())?);
            }
        }
        let metrics = BTreeMap::new();
        done.push(CaseRuns { named, metrics });
    }
    for (run, report) in planned.iter().zip(reports(&planned)?) {
        let metrics = metrics(experiment, run, report).with_context(|| words(run))?;
        let of_case = &mut done[run.case].metrics;
        of_case.insert(run.variant.name.clone(), metrics);
    }
    Ok(done)
}

fn plan<'a>(
    experiment: &RowExperiment,
    case: usize,
    variant: &'a RowVariant,
    seed: Option<u32>,
    mut named: NamedValues,
) -> anyhow::Result<PlannedRun<'a>> {
    let at = || format!("variant {}", variant.name);
    named.extend(json_of(&variant.set)?);
    resolve(&experiment.computed, &mut named, false).with_context(at)?;
    let facts = Value::Object(named.clone());
    let mut scenario = String::new();
    if let Some(template) = &experiment.scenario {
        let mut template = template.clone();
        template.remove("file");
        let base = match named.get("file") {
            Some(file) => Table::deserialize(file).context("the scenario's file")?,
            None => Table::new(),
        };
        let mut built = template::built(base, &template, &facts).with_context(at)?;
        if let Some(seed) = seed {
            built.insert("seed".to_owned(), seed.into());
        }
        scenario = built.to_string();
    }
    let mut ends = template::built(Table::new(), &experiment.ends, &facts).with_context(at)?;
    ends = template::built(ends, &variant.ends, &facts).with_context(at)?;
    Ok(PlannedRun {
        case,
        variant,
        named,
        scenario,
        ends,
    })
}

/// A short description of the run for messages.
fn words(run: &PlannedRun<'_>) -> String {
    let short = run
        .named
        .iter()
        .filter(|(_, value)| !value.is_object() && !value.is_array());
    let short: Vec<_> = short
        .map(|(name, value)| format!("{name} {}", template::words(value)))
        .collect();
    format!("variant {} ({})", run.variant.name, short.join(", "))
}

/// The report, and the metrics that are computed from it.
fn metrics(
    experiment: &RowExperiment,
    run: &PlannedRun<'_>,
    report: Value,
) -> anyhow::Result<Value> {
    let mut facts = run.named.clone();
    let Value::Object(mut metrics) = report else {
        return Err(anyhow!("the report is no object"));
    };
    facts.extend(metrics.clone());
    metrics.extend(resolve(&experiment.run, &mut facts, false)?);
    let facts = Value::Object(facts);
    for required in &experiment.require {
        ensure!(
            template::is_true(required, &facts)?,
            "`{required}` is not true of its report"
        );
    }
    Ok(Value::Object(metrics))
}

fn parsed(scenario: &str, files: &SourceFiles) -> anyhow::Result<Scenario> {
    let mut open = |name: &str| files.open(name);
    Ok(Scenario::parse("the row's scenario", scenario, &mut open)?)
}

/// Simulates the runs, and returns the reports in their order.
fn simulated(planned: &[PlannedRun<'_>], files: &SourceFiles) -> anyhow::Result<Vec<Value>> {
    let mut first: BTreeMap<(String, String), usize> = BTreeMap::new();
    let mut same_as = Vec::new();
    for (n, run) in planned.iter().enumerate() {
        let what = (run.scenario.clone(), run.ends.to_string());
        same_as.push(*first.entry(what).or_insert(n));
    }
    let different: Vec<usize> = first.into_values().collect();
    let next = AtomicUsize::new(0);
    let reports = Mutex::new(BTreeMap::new());
    let at_once = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..at_once.min(different.len()) {
            scope.spawn(|| {
                while let Some(n) = different.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = simulate(&planned[*n], files);
                    let mut reports = reports.lock().expect("no run panics with the lock held");
                    reports.insert(*n, report);
                }
            });
        }
    });
    let mut reports = reports
        .into_inner()
        .expect("no run panics with the lock held");
    let mut told = BTreeMap::new();
    for n in different {
        let report = reports.remove(&n).context("a run came to nothing")?;
        told.insert(n, report.with_context(|| words(&planned[n]))?);
    }
    Ok(same_as.iter().map(|n| told[n].clone()).collect())
}

fn simulate(run: &PlannedRun<'_>, files: &SourceFiles) -> anyhow::Result<Value> {
    let scenario = parsed(&run.scenario, files)?;
    let ends = ends(&scenario, &run.ends)?;
    let report = run_between(&scenario, &ends, None)?.report;
    Ok(scenario.facts(&report))
}

/// Carries out the runs on real sockets, and returns the reports in their order. `client`: the options of those that the
/// kernel does not carry.
fn on_real_sockets(
    experiment: &RowExperiment,
    planned: &[PlannedRun<'_>],
    files: &SourceFiles,
    client: &[&str],
) -> anyhow::Result<Vec<Value>> {
    let mut reports = Vec::new();
    let mut by_bench = BTreeMap::new();
    let together = |a: &PlannedRun<'_>, b: &PlannedRun<'_>| experiment.together && a.case == b.case;
    for at_once in planned.chunk_by(together) {
        if !experiment.bench.is_empty() {
            for run in at_once {
                let report = by_the_bench(experiment, run, files, &mut by_bench);
                reports.push(report.with_context(|| words(run))?);
            }
            continue;
        }
        let begun = at_once.iter().map(|run| begin(run, client));
        let begun: Vec<_> = begun.collect::<anyhow::Result<_>>()?;
        for (run, begun) in at_once.iter().zip(begun) {
            let report = begun.report().with_context(|| words(run))?;
            reports.push(parsed(&run.scenario, files)?.facts(&report));
        }
    }
    Ok(reports)
}

fn begin(run: &PlannedRun<'_>, client: &[&str]) -> anyhow::Result<StartedLabRun> {
    let over = run.variant.over.as_ref();
    let options = over.map_or(client.to_vec(), |over| vec!["--over", over.as_str()]);
    StartedLabRun::begin(&run.scenario, &options).with_context(|| words(run))
}

/// The output of the bench program. The same arguments return the same output again.
/// `{scenario_file}` in the arguments stands for its scenario.
fn by_the_bench(
    experiment: &RowExperiment,
    run: &PlannedRun<'_>,
    files: &SourceFiles,
    said: &mut BTreeMap<(String, Vec<String>), Value>,
) -> anyhow::Result<Value> {
    let mut named = run.named.clone();
    let arguments = |named: &NamedValues| -> anyhow::Result<Vec<String>> {
        let facts = Value::Object(named.clone());
        let arguments = experiment.bench.iter();
        arguments
            .map(|argument| template::text(argument, &facts))
            .collect()
    };
    named.insert("scenario_file".to_owned(), "".into());
    let what = (run.scenario.clone(), arguments(&named)?);
    if let Some(report) = said.get(&what) {
        return Ok(report.clone());
    }
    let folder = tempfile::tempdir()?;
    if !run.scenario.is_empty() {
        let file = written(folder.path(), &run.scenario, files)?;
        named.insert("scenario_file".to_owned(), file.into());
    }
    let arguments = arguments(&named)?;
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let report: Value = by_bench(&words)?;
    said.insert(what, report.clone());
    Ok(report)
}

/// Writes a scenario and the traces it names into a folder.
fn written(folder: &Path, scenario: &str, files: &SourceFiles) -> anyhow::Result<String> {
    let scenarios = folder.join("scenarios");
    std::fs::create_dir(&scenarios)?;
    let mut traces = Vec::new();
    Scenario::parse("the row's scenario", scenario, &mut |name| {
        let text = files.open(name)?;
        traces.push((name.to_owned(), text.clone()));
        Ok(text)
    })?;
    for (name, text) in traces {
        let path = scenarios.join(name);
        let parent = path.parent().context("a trace without a folder")?;
        std::fs::create_dir_all(parent)?;
        std::fs::write(&path, text)?;
    }
    let file = scenarios.join("row.toml");
    std::fs::write(&file, scenario)?;
    let file = file
        .to_str()
        .context("the folder for temporary files has an odd name")?;
    Ok(file.to_owned())
}

/// Settings of both ends that scenarios do not have.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndsSettings {
    #[serde(default)]
    device: EndSettings,
    #[serde(default)]
    proxy: EndSettings,
}

/// Settings of one end; absent ones are as in the scenario.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndSettings {
    /// The congestion controller for data that the end sends.
    congestion: Option<String>,
    /// λ of DRWA: the end, as a receiver, adjusts its window by what arrives.
    drwa: Option<f64>,
    /// Bytes of a flow that it allows to be in flight towards it.
    window_bytes: Option<u64>,
}

fn ends(scenario: &Scenario, settings: &Table) -> anyhow::Result<EndpointConfigs> {
    let mut ends = EndpointConfigs::of(scenario);
    let EndsSettings { device, proxy } = EndsSettings::deserialize(settings.clone())
        .map_err(|fault| anyhow!("ends: {}", cedos_lab_scenario::explain(&fault)))?;
    device.apply(&mut ends.device).context("ends.device")?;
    proxy.apply(&mut ends.proxy).context("ends.proxy")?;
    Ok(ends)
}

impl EndSettings {
    fn apply(self, config: &mut EndpointConfig) -> anyhow::Result<()> {
        if let Some(name) = self.congestion {
            let mut kinds = CongestionKind::ALL.into_iter();
            config.congestion = kinds.find(|kind| kind.as_str() == name).with_context(|| {
                let names = CongestionKind::ALL.map(CongestionKind::as_str);
                format!(
                    "there is no congestion control {name}; there are {}",
                    names.join(", ")
                )
            })?;
        }
        if let Some(lambda) = self.drwa {
            let lambda = lambda.to_string().parse();
            config.drwa = Some(lambda.map_err(|fault| anyhow!("drwa: {fault}"))?);
        }
        if let Some(bytes) = self.window_bytes {
            config.flow_window = bytes;
        }
        Ok(())
    }
}
