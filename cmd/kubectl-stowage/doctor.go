// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"stowage.dev/stowage/pkg/doctor"
	"stowage.dev/stowage/pkg/snapshot"
)

// examination is the output of doctor as an object.
type examination struct {
	header
	*doctor.Report
}

func (c *cli) doctorCommand() *cobra.Command {
	command := &cobra.Command{
		Use: "doctor", Short: "Look for faults of the installation, and say what to do about each",
		Long: `Look for faults of the installation, and say what to do about each: versions, feature gates, classes, rights, admission policies,
schedulers and the fence, node agents, slices, taints, device plugins beside DRA, pods that nobody schedules. docs/kubectl.md lists the
checks.

What you may not read is not looked at, and is named. Nothing is changed. The exit code is 0 if nothing was found, and 3 if something was.`,
		Example: "  kubectl stowage doctor\n  kubectl stowage doctor -o wide   # with the checks that found nothing\n" +
			"  kubectl stowage doctor -o json | jq '.findings[] | select(.severity == \"error\")'",
		Args: none,
		RunE: func(command *cobra.Command, _ []string) error {
			s, err := c.readInstallation(command.Context())
			if err != nil {
				return err
			}
			report := doctor.Examine(s)
			if err := c.printReport(report); err != nil {
				return err
			}
			if len(report.Findings) > 0 {
				return errNo
			}
			return nil
		},
	}
	c.printFlags(command, false)
	return command
}

// readInstallation returns the file, or the cluster with what doctor needs besides.
func (c *cli) readInstallation(ctx context.Context) (*snapshot.Snapshot, error) {
	s, err := c.read(ctx)
	if err != nil || c.file != "" {
		return s, err
	}
	client, err := c.client()
	if err != nil {
		return nil, err
	}
	return s, snapshot.TakeInstallation(ctx, client, s)
}

var severityStyles = map[doctor.Severity]style{doctor.Error: red, doctor.Warning: yellow}

func (c *cli) printReport(r *doctor.Report) error {
	switch {
	case c.output == "json" || c.output == "yaml":
		return c.writeObject(&examination{header{snapshot.APIVersion, "Examination"}, r})
	case c.noHeaders:
		t := &table{headers: []string{"SEVERITY", "CHECK", "OBJECT", "PROBLEM"}}
		for _, f := range r.Findings {
			t.add(cell{text: string(f.Severity), style: severityStyles[f.Severity]}, text(f.Check), text(f.Object), text(f.Problem))
		}
		return t.write(c.Out, c.terminalOf(), false)
	}
	p := c.paragraphs()
	number := map[doctor.Severity]int{}
	for i, f := range r.Findings {
		if i > 0 {
			fmt.Fprintln(c.Out)
		}
		number[f.Severity]++
		p.print(0, severityStyles[f.Severity], "%s: %s (%s)", strings.ToUpper(string(f.Severity[:1]))+string(f.Severity[1:]), f.Object, f.Check)
		p.print(2, plain, "%s.", strings.TrimSuffix(f.Problem, "."))
		p.print(2, plain, "Do: %s", f.Do)
	}
	if len(r.Findings) > 0 {
		fmt.Fprintln(c.Out)
	}
	if c.output == "wide" {
		t := &table{headers: []string{"CHECK", "FOUND", "WHAT IS LOOKED FOR"}}
		for _, check := range doctor.Table() {
			found := cell{text: "nothing", style: green}
			switch {
			case slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool { return f.Check == check.Name }):
				found = cell{text: "faults", style: red}
			case !slices.Contains(r.Passed, check.Name):
				found = cell{text: "not looked at", style: yellow}
			}
			t.add(text(check.Name), found, text(strings.ReplaceAll(check.About, "`", "")))
		}
		if err := t.write(c.Out, c.terminalOf(), true); err != nil {
			return err
		}
		fmt.Fprintln(c.Out)
	}
	for i, skipped := range r.Skipped { // those of one reason are told of together
		why := func(s doctor.Skipped) bool { return s.Why == skipped.Why }
		if slices.IndexFunc(r.Skipped, why) < i {
			continue
		}
		var names []string
		for _, other := range r.Skipped {
			if why(other) {
				names = append(names, other.Check)
			}
		}
		p.print(0, plain, "Not looked at: %s (%s).", strings.Join(names, ", "), skipped.Why)
	}
	done := len(doctor.Table()) - len(r.Skipped)
	if len(r.Findings) == 0 {
		p.print(0, green, "%d checks found nothing.", done)
		return nil
	}
	p.print(0, bold, "%d checks: %s, %s.", done, count(number[doctor.Error], "error"), count(number[doctor.Warning], "warning"))
	return nil
}
