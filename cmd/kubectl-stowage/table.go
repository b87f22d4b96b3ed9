// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/moby/term"
	"sigs.k8s.io/yaml"
)

// style is a color of a terminal, by its number; 0 is none.
type style int

const (
	plain  style = 0
	red    style = 31
	green  style = 32
	yellow style = 33
	blue   style = 34
	bold   style = 1
)

// cell is what stands in a column.
type cell struct {
	text  string
	style style
	// ages tells that it changes with time alone, which is no change of the row.
	ages bool
}

// table is rows under headers. On a terminal that is too narrow the widest columns are cut.
type table struct {
	headers []string
	rows    [][]cell
	// keys tell the rows apart over time, for --watch.
	keys []string
}

func (t *table) add(cells ...cell) { t.rows = append(t.rows, cells) }

// addOf adds the row of something that has a name.
func (t *table) addOf(key string, cells ...cell) {
	t.keys = append(t.keys, key)
	t.add(cells...)
}

func text(s string) cell { return cell{text: s} }

// or is "-" for what is empty, so that columns can be told apart.
func or(s string) cell {
	if s == "" {
		s = "-"
	}
	return cell{text: s}
}

// terminal is what is known of the writer.
type terminal struct {
	width int // 0 is unlimited
	color bool
}

// terminalOf looks at the output. COLUMNS wins over what the terminal says, as in other programs; it counts on terminals alone.
func (c *cli) terminalOf() terminal {
	var t terminal
	fd, isTerminal := term.GetFdInfo(c.Out)
	if isTerminal {
		if size, err := term.GetWinsize(fd); err == nil {
			t.width = int(size.Width)
		}
		if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
			t.width = n
		}
	}
	t.color = c.color == "always" || c.color == "auto" && isTerminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return t
}

func (t terminal) paint(s string, as style) string {
	if !t.color || as == plain || s == "" {
		return s
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", as, s)
}

// write prints the table. Text from the API has no control characters when it comes out: they could command the terminal.
func (t *table) write(w io.Writer, to terminal, headers bool) error {
	rows := t.rows
	if headers {
		head := make([]cell, len(t.headers))
		for i, h := range t.headers {
			head[i] = cell{text: h, style: bold}
		}
		rows = append([][]cell{head}, rows...)
	}
	widths := make([]int, len(t.headers))
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(printable(c.text)))
		}
	}
	gap := fit(widths, to.width)
	var out strings.Builder
	for _, row := range rows {
		line := 0
		for i, c := range row {
			if to.width > 0 && line >= to.width {
				break
			}
			s := cut(printable(c.text), widths[i])
			if to.width > 0 {
				s = cut(s, to.width-line)
			}
			n := utf8.RuneCountInString(s)
			out.WriteString(to.paint(s, c.style))
			if line += n; i < len(row)-1 {
				pad := widths[i] - n + gap
				if to.width > 0 {
					pad = max(0, min(pad, to.width-line))
				}
				out.WriteString(strings.Repeat(" ", pad))
				line += pad
			}
		}
		out.WriteString("\n")
	}
	_, err := io.WriteString(w, out.String())
	return err
}

const (
	// wide is how far apart columns are, where there is room.
	wide = 3
	// narrowest is how narrow a column gets for others to be seen.
	narrowest = 8
)

// fit makes the widest columns narrower until a row has room, or none can be, and then the gap between columns, which it returns.
func fit(widths []int, room int) int {
	if room <= 0 {
		return wide
	}
	for gap := wide; ; {
		sum, widest := gap*(len(widths)-1), 0
		for i, width := range widths {
			if sum += width; width > widths[widest] {
				widest = i
			}
		}
		switch {
		case sum <= room:
			return gap
		case widths[widest] > narrowest:
			widths[widest]--
		case gap > 1:
			gap--
		default:
			return gap
		}
	}
}

// cut shortens a text to n columns.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:max(0, n-1)]) + "…"
}

// printable replaces what commands a terminal, and what is not seen or changes the order of other text: control and format characters, such
// as those for text from right to left, and ends of lines. Tenants write messages and expressions.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
}

// writeObject prints JSON or YAML.
func (c *cli) writeObject(object any) error {
	out, err := json.MarshalIndent(object, "", "  ")
	if err == nil && c.output == "yaml" {
		out, err = yaml.JSONToYAML(out)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(c.Out, strings.TrimRight(string(out), "\n"))
	return err
}

// header is what objects of ours begin with.
type header struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}
