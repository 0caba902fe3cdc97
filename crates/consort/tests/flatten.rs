//! A16: tensors inside users' types, pending or not, are taken out and put back in order.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort::{Dtype, Flatten, Pending, Reduce, Tensor, spawn};

#[derive(Flatten)]
struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

#[derive(Flatten)]
enum Norm {
    Rms { weight: Tensor, eps: f64 },
    Layer(Tensor, Tensor),
    None,
}

#[derive(Flatten)]
struct Model<T> {
    layers: Vec<(Linear, Norm)>,
    name: String,
    cache: [T; 2],
    coming: Option<Pending<Tensor>>,
}

fn number(x: i64) -> Tensor {
    Tensor::from_slice(&[x], &[1]).unwrap()
}

fn model() -> Model<Tensor> {
    let rms = Norm::Rms { weight: number(3), eps: 0.5 };
    let layers = vec![
        (Linear { weight: number(1), bias: Some(number(2)) }, rms),
        (Linear { weight: number(4), bias: None }, Norm::Layer(number(5), number(6))),
        (Linear { weight: number(7), bias: None }, Norm::None),
    ];
    Model { layers, name: "m".into(), cache: [number(8), number(9)], coming: None }
}

#[test]
fn a16_fields_come_in_the_order_of_their_declaration() {
    let model = model();
    let numbers = |model: &Model<Tensor>| -> Vec<i64> {
        model.flatten().iter().map(|x| x.item::<i64>().unwrap()).collect()
    };
    assert_eq!(numbers(&model), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let tens = model.flatten().iter().map(|x| x.mul(&number(10)).unwrap()).collect();
    let other = model.unflatten(tens).unwrap();
    assert_eq!(numbers(&other), [10, 20, 30, 40, 50, 60, 70, 80, 90]);
    assert_eq!(other.name, "m");
    assert!(matches!(&other.layers[0].1, Norm::Rms { eps, .. } if *eps == 0.5));
    assert!(matches!(other.layers[2].1, Norm::None));
    let error = model.unflatten(vec![number(1)]).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("unflatten: expected 9 tensors, got 1\n  at "), "{error}");
}

#[test]
fn a16_what_is_on_its_way_stays_so() {
    let outcomes = spawn(2, |mesh| {
        let mut model = model();
        let ones = Tensor::ones(Dtype::F32, &[50_000])?;
        model.cache[0] = mesh.all_gather(&ones, 0)?;
        model.coming = Some(mesh.pending(|| mesh.all_reduce(ones, Reduce::Sum))?);
        assert_eq!(mesh.in_flight(), 2);
        let model = model.unflatten(model.flatten())?;
        assert_eq!((mesh.in_flight(), consort::is_tracing()), (2, false));
        assert!(model.cache[0].to_vec::<f32>()?.iter().all(|x| *x == 1.0));
        let sum = model.coming.unwrap().wait()?;
        assert_eq!((sum.to_vec::<f32>()?[49_999], mesh.in_flight()), (2.0, 0));
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
