// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// figures are what was measured, in the order in which it was.
type figures struct {
	Size    size     `json:"size"`
	Cores   int      `json:"cores"`
	Figures []figure `json:"figures"`
}

// figure is one of them. Durations are in seconds, sizes in MiB.
type figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
}

func newFigures(s size) *figures { return &figures{Size: s, Cores: runtime.NumCPU()} }

func (f *figures) number(name string, value float64, unit string) {
	f.Figures = append(f.Figures, figure{name, value, unit})
}

func (f *figures) seconds(name string, d time.Duration) { f.number(name, d.Seconds(), "s") }

func (f *figures) mebibytes(name string, bytes float64) { f.number(name, bytes/(1<<20), "MiB") }

// print writes them as a table.
func (f *figures) print(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, one := range f.Figures {
		fmt.Fprintf(table, "%s\t%s\n", one.Name, strings.TrimSpace(short(one.Value)+" "+one.Unit))
	}
	return table.Flush()
}

// short has three digits at least, and no fraction that means nothing.
func short(value float64) string {
	digits := 0
	switch {
	case value == float64(int64(value)):
	case value < 1:
		digits = 3
	case value < 100:
		digits = 1
	}
	return strconv.FormatFloat(value, 'f', digits, 64)
}

// write writes them as JSON.
func (f *figures) write(file string) error {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("writing the figures: %w", err)
	}
	return nil
}
