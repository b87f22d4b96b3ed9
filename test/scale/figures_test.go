// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestFiguresArePrintedAndWritten(t *testing.T) {
	f := newFigures(size{Nodes: 1})
	f.seconds("start: ready after", 1234*time.Millisecond)
	f.mebibytes("memory", 300<<20)
	f.number("pods", 25000, "")
	f.number("share", 0.12345, "")
	var table strings.Builder
	if err := f.print(&table); err != nil {
		t.Fatal(err)
	}
	want := "start: ready after  1.2 s\nmemory              300 MiB\npods                25000\nshare               0.123\n"
	if diff := cmp.Diff(want, table.String()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}

	file := filepath.Join(t.TempDir(), "figures.json")
	if err := f.write(file); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got figures
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*f, got); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
}

func TestQuantilesAndTheSpanOfABurst(t *testing.T) {
	begin := time.Now()
	var all []binding
	for i := range 100 {
		all = append(all, binding{created: begin, bound: begin.Add(time.Duration(i+1) * time.Second)})
	}
	if got := quantile(all, 0.5); got != 51*time.Second {
		t.Errorf("median %s", got)
	}
	if got := quantile(all, 0.99); got != 100*time.Second {
		t.Errorf("99th percentile %s", got)
	}
	if got := span(all); got != 100*time.Second {
		t.Errorf("span %s", got)
	}
	if quantile(nil, 0.5) != 0 || span(nil) != 0 {
		t.Error("no bindings take time")
	}
}
