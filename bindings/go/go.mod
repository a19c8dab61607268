module github.com/cedos/cedos/bindings/go

go 1.21
