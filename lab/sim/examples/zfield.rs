use cedos_lab_sim::field::*;
use d2tp_sched::Mode;
use d2tp_time::Span;
fn main() {
    let a: Vec<f64> = std::env::args().skip(1).map(|x| x.parse().unwrap()).collect();
    let class = |share, from_h, until_h| Delays { share, from_h, until_h };
    let study = Study {
        people: a[0] as u64,
        length: Span::from_secs(56 * 86_400),
        downloads: (a[0] * 56.68) as u64,
        size: Spread::of_mean(71.2e9 / 2834.0, 0.8),
        delays: vec![class(20.0, 0.0, 0.0), class(12.0, 1.0/6.0, 1.0), class(48.0, 1.0, 3.0), class(20.0, 3.0, 6.0)],
        at_once_on_wifi: a[1],
        stays: Spread { median: a[2], deviation: a[3] },
        gaps: Spread { median: a[4], deviation: a[5] },
        wifi: Spread::of_mean(2.68e6 / 8.0, 0.5),
        cell: Spread::of_mean(0.82e6 / 8.0, 0.4),
        minutes: Spread { median: 1.0, deviation: 0.25 },
    };
    for (name, mode) in [("alg1", Mode::AlgorithmOne { margin: 0.0 }), ("free", Mode::FreeOnly), ("ours", Mode::Outlook)] {
        if a.len() > 7 && name == "ours" { continue; }
        let t = std::time::Instant::now();
        let mut all = vec![];
        for n in 0..study.people { let p = study.person(a[6] as u64, n); all.extend(study.fetch(&p, mode)); }
        print!("{name}: ");
        let (mut w, mut b) = (0.0, 0.0);
        for c in 0..4 {
            let of = || all.iter().filter(|f| f.class == c);
            let bytes: f64 = of().map(|f| f.job.bytes as f64).sum();
            let wifi: f64 = of().map(|f| f.of_job.carried[0]).sum();
            let cell: f64 = of().map(|f| f.of_job.carried[1]).sum();
            let missed = of().filter(|f| f.of_job.complete.is_none()).count() as f64 / of().count() as f64;
            print!("| {:.1} cell {:.1} miss {:.1} ", 100.0 * wifi / bytes, 100.0*cell/bytes, 100.0 * missed);
            w += wifi; b += bytes;
        }
        let sw: Vec<_> = all.iter().filter(|f| f.of_job.switches > 0).collect();
        let near: f64 = all.iter().map(|f| f.near_wifi.as_secs_f64()).sum();
        let under: f64 = all.iter().map(|f| f.under_way.as_secs_f64()).sum();
        let vain: f64 = all.iter().map(|f| f.of_job.interrupted_at).sum();
        println!("| all {:.1} attached {:.1} switching {:.1} by {:.1} vain {:.1}  {:?}", 100.0 * w / b, 100.0 * near / under,
            100.0 * sw.len() as f64 / all.len() as f64,
            sw.iter().map(|f| f.of_job.switches as f64).sum::<f64>() / sw.len().max(1) as f64, 100.0 * vain / b, t.elapsed());
    }
}
