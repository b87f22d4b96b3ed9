// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/stepaside"
)

// errQuarantined: the claim is released, and something on a GPU could not be undone.
var errQuarantined = errors.New("the claim is released, but GPUs are in quarantine")

// exitCode is what scripts can tell outcomes by; the commands' help lists them.
func exitCode(err error) int {
	var checked *checkError
	switch {
	case errors.As(err, &checked):
		return checked.exitCode()
	case errors.Is(err, prepare.ErrInUse), errors.Is(err, stepaside.ErrStillOpen), errors.Is(err, stepaside.ErrStillReleased):
		return 2
	case errors.Is(err, errQuarantined):
		return 3
	case errors.Is(err, prepare.ErrNoClaim):
		return 4
	default:
		return 1
	}
}

const exitCodes = `
Exit codes: 0 done; 1 failed; 2 refused, because something uses the claim or that is not known; 3 released, but a GPU is in
quarantine; 4 there is no such claim.`

// newLedgerCommand returns "ledger", with which an administrator looks at prepared claims and repairs them.
func newLedgerCommand(opts *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ledger",
		Short: "Look at the claims that are prepared on this node, and release one whose record cannot be read",
		Long: `Look at the claims that are prepared on this node, and release one whose record cannot be read.

Run it on the node, or in the agent's container, with the folders that the agent has in its flags.
` + exitCodes,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newLedgerListCommand(opts), newLedgerShowCommand(opts), newLedgerReleaseCommand(opts))
	return cmd
}

func newLedgerListCommand(opts *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the claims of the ledger, and those with a GPU in quarantine",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			found, err := prepare.Inspect(opts.stateDir)
			if err != nil {
				return fmt.Errorf("--state-dir %s: %w", opts.stateDir, err)
			}
			return printLedger(cmd.OutOrStdout(), found)
		},
	}
	cmd.Flags().StringVar(&opts.stateDir, "state-dir", opts.stateDir, "the agent's --state-dir")
	return cmd
}

func printLedger(out io.Writer, found []prepare.Found) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "CLAIM\tNAME\tDEVICES\tSTATE\tREADABLE\tQUARANTINE")
	for _, f := range found {
		name, state, quarantine := "-", "-", []string{}
		if f.Name != "" {
			name = f.Namespace + "/" + f.Name
		}
		if f.State != "" {
			state = string(f.State)
		}
		for _, q := range f.Quarantine {
			quarantine = append(quarantine, q.GPU)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", f.UID, name, list(f.Devices), state, f.Readable(), list(quarantine))
	}
	return table.Flush()
}

func list(names []string) string {
	if len(names) == 0 {
		return "-"
	}
	return strings.Join(names, ",")
}

func newLedgerShowCommand(opts *options) *cobra.Command {
	output := "yaml"
	cmd := &cobra.Command{
		Use:   "show CLAIM",
		Short: "Show what is recorded of a claim, in both copies of its record, and what is owed for it",
		Long: `Show what is recorded of a claim, in both copies of its record, and what is owed for it.

CLAIM is its UID or, where that is known, NAMESPACE/NAME.
` + exitCodes,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			found, err := findClaim(opts, args[0])
			if err != nil {
				return err
			}
			encode := func(v any) ([]byte, error) { return yaml.Marshal(v) }
			switch output {
			case "yaml":
			case "json":
				encode = func(v any) ([]byte, error) {
					data, err := json.MarshalIndent(v, "", "  ")
					return append(data, '\n'), err
				}
			default:
				return fmt.Errorf("--output %q: want yaml or json", output)
			}
			data, err := encode(found)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(data)
			return err
		},
	}
	cmd.Flags().StringVar(&opts.stateDir, "state-dir", opts.stateDir, "the agent's --state-dir")
	cmd.Flags().StringVarP(&output, "output", "o", output, "yaml or json")
	return cmd
}

// findClaim finds one claim by its UID, or by namespace and name.
func findClaim(opts *options, claim string) (*prepare.Found, error) {
	found, err := prepare.Inspect(opts.stateDir)
	if err != nil {
		return nil, fmt.Errorf("--state-dir %s: %w", opts.stateDir, err)
	}
	var matches []*prepare.Found
	for i := range found {
		if f := &found[i]; f.UID == types.UID(claim) || f.Name != "" && f.Namespace+"/"+f.Name == claim {
			matches = append(matches, f)
		}
	}
	switch len(matches) {
	case 0:
		return nil, fmt.Errorf("claim %q: %w; node-agent ledger list has them", claim, prepare.ErrNoClaim)
	case 1:
		return matches[0], nil
	default:
		return nil, fmt.Errorf("claim %q: there are %d of that name, %s and %s among them: give the UID", claim, len(matches),
			matches[0].UID, matches[1].UID)
	}
}

func newLedgerReleaseCommand(opts *options) *cobra.Command {
	force := false
	cmd := &cobra.Command{
		Use:   "release CLAIM",
		Short: "Take a claim's devices back, as the agent would, once it is certain that nobody uses them",
		Long: `Take a claim's devices back, as the agent would, once it is certain that nobody uses them.

CLAIM is its UID or, where that is known, NAMESPACE/NAME. It is for a claim whose record cannot be read, and that so keeps its GPUs and its
pod from going. It may run beside the agent, has the agent's locks, and needs the agent's flags.

That nobody uses the claim is proven as the agent does it: by the API server, the kubelet and the GPUs' processes, in two looks a
minute apart. Otherwise it is refused, and the reason is told. A pod that is being deleted counts as ended when none of its processes
is left.

The pods of the node are listed as that node. So whoever --kubeconfig speaks for needs the right to impersonate the user
system:node:NODE. The agent's own account has it.

With --force no proof is needed. Then a container that still runs may have its GPU together with the next claim's.
` + exitCodes,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !filepath.IsAbs(opts.stateDir) {
				return fmt.Errorf("--state-dir %q: an absolute path is needed", opts.stateDir)
			}
			found, err := findClaim(opts, args[0])
			if err != nil {
				return err
			}
			if err := opts.validateRun(); err != nil {
				return err
			}
			api, err := newClientsOf(opts.kubeconfig, opts.nodeName)
			if err != nil {
				if !force {
					return err
				}
				api = clients{}
			}
			opts.keepSimulation()
			agent, _, err := newAgent(cmd.Context(), opts, api, newKeeper(opts, api))
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if found.Problem != "" {
				fmt.Fprintf(out, "found: record of claim %s: readable: %s: %s\n", found.UID, found.Readable(), found.Problem)
			}
			fmt.Fprintf(out, "found: claim %s holds %s\n", found.UID, list(found.Devices))
			done, err := agent.Release(cmd.Context(), found.UID, force, func(line string) { fmt.Fprintln(out, line) })
			for _, line := range done.Did {
				fmt.Fprintln(out, line)
			}
			for _, line := range done.Left {
				fmt.Fprintln(out, "left:", line)
			}
			if err == nil && len(done.Quarantined) > 0 {
				err = errQuarantined
			}
			return err
		},
	}
	opts.addRunFlags(cmd.Flags())
	cmd.Flags().BoolVar(&force, "force", force,
		"release it without proof: a container that still runs may have its GPU together with the next claim's")
	return cmd
}
