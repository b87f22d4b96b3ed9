// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"stowage.dev/stowage/pkg/snapshot"
)

// show prints what view makes of the cluster: a table, a line below it, and the same as an object. With --watch it prints rows that are
// new or have changed, as kubectl does, or the whole object on a line of its own.
func (c *cli) show(ctx context.Context, view func(*snapshot.Snapshot) (*table, string, any)) error {
	if !c.watch {
		s, err := c.read(ctx)
		if err != nil {
			return err
		}
		t, note, object := view(s)
		return c.print(t, note, object)
	}
	collectInTime()
	client, err := c.client()
	if err != nil {
		return err
	}
	// Rights are asked for by a list: a reflector without them would try for ever.
	if _, err := snapshot.Take(ctx, client); err != nil {
		return err
	}
	printed := map[string][]cell{}
	first := true
	return snapshot.Watch(ctx, client, func(s *snapshot.Snapshot) error {
		t, _, object := view(s)
		if c.output == "json" || c.output == "yaml" {
			return c.writeStream(object)
		}
		all := t.rows
		t.rows = nil
		seen := map[string]bool{}
		for i, row := range all {
			key := t.keys[i]
			seen[key] = true
			lasting := slices.DeleteFunc(slices.Clone(row), func(c cell) bool { return c.ages })
			if !slices.Equal(printed[key], lasting) {
				printed[key] = lasting
				t.rows = append(t.rows, row)
			}
		}
		for key := range printed {
			if !seen[key] {
				delete(printed, key)
			}
		}
		if len(t.rows) == 0 && !first {
			return nil
		}
		headers := first && !c.noHeaders
		first = false
		return t.write(c.Out, c.terminalOf(), headers)
	})
}

func (c *cli) print(t *table, note string, object any) error {
	if c.output == "json" || c.output == "yaml" {
		return c.writeObject(object)
	}
	to := c.terminalOf()
	if len(t.rows) > 0 || note == "" {
		if err := t.write(c.Out, to, !c.noHeaders); err != nil {
			return err
		}
	}
	if c.noHeaders || note == "" {
		return nil
	}
	if len(t.rows) > 0 {
		fmt.Fprintln(c.Out)
	}
	c.paragraphs().print(0, plain, "%s", note)
	return nil
}

// writeStream prints an object as one of many: JSON a line, YAML a document.
func (c *cli) writeStream(object any) error {
	if c.output == "yaml" {
		fmt.Fprintln(c.Out, "---")
		return c.writeObject(object)
	}
	return json.NewEncoder(c.Out).Encode(object)
}
