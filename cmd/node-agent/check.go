// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/hostcheck"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// hostOptions say what is looked at on the host.
type hostOptions struct {
	// root is the host's root folder as this program sees it, and proc its /proc.
	root, proc string
	// runtime is a path on the host, or [hostcheck.Auto].
	runtime string
	// toolkitConfig is a path on the host, or [cdi.AutoToolkitConfig].
	toolkitConfig string
	// auto: no flag says where the driver is, and it may turn out to be elsewhere. awaited: there was none at the start.
	auto, awaited bool
}

func defaultHostOptions() hostOptions {
	return hostOptions{root: "/", proc: "/proc", runtime: hostcheck.Auto, toolkitConfig: cdi.AutoToolkitConfig}
}

func (o *hostOptions) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.runtime, "container-runtime-endpoint", o.runtime,
		"the container runtime's CRI socket on the host, below --host-root, which is asked whether it reads CDI specifications; auto looks "+
			"where containerd, k3s, RKE2, CRI-O, k0s and MicroK8s have it")
	flags.StringVar(&o.toolkitConfig, "toolkit-config", o.toolkitConfig,
		"configuration file of NVIDIA's container runtime on the host, below --host-root; a warning tells if it lets containers get GPUs by "+
			"NVIDIA_VISIBLE_DEVICES. auto looks where the GPU operator has it, and at /etc/nvidia-container-runtime/config.toml; with an empty "+
			"value nothing is looked at")
}

// settleDriverRoot finds the driver's files, if no flag says where they are. It stays what it is for as long as
// the process runs: a library is loaded once.
func (o *options) settleDriverRoot() {
	if o.driverRoot != nvml.SpecAuto {
		return
	}
	onHost, found := nvml.FindDriverRoot(o.host.root, o.host.proc)
	o.host.auto, o.host.awaited = true, !found
	o.driverRoot = filepath.Join(o.host.root, onHost)
	if o.hostDriverRoot == "" && o.driverRoot != onHost {
		o.hostDriverRoot = onHost
	}
}

// driverElsewhere tells whether the driver is elsewhere than where it was looked for at the start, as a driver container
// that has come: the agent has to begin anew then. Where a driver was found at the start, as the files that an older one
// left on the host, only the one that the kernel has loaded meanwhile counts. Files that come and go while it has none, as
// in an upgrade, end no agent.
func (o *options) driverElsewhere() (onHost string, elsewhere bool) {
	if !o.host.auto {
		return "", false
	}
	onHost, found := nvml.FindDriverRoot(o.host.root, o.host.proc)
	root := filepath.Join(o.host.root, onHost)
	if !found || root == o.driverRoot {
		return "", false
	}
	loaded := nvml.KernelDriverVersion(o.host.proc)
	is := func(root string) bool { return loaded != "" && nvml.LibraryVersion(nvml.LibraryAt(root)) == loaded }
	return onHost, o.host.awaited && nvml.LibraryAt(o.driverRoot) == "" || is(root) && !is(o.driverRoot)
}

func (o *options) checker() *hostcheck.Checker {
	return hostcheck.New(hostcheck.Host{
		Root: o.host.root, Proc: o.host.proc, DriverRoot: o.driverRoot, KubeletRoot: o.kubeletRoot, CDIDir: o.cdiRoot, Runtime: o.host.runtime,
		Hook: o.hook.path, ToolkitConfig: o.host.toolkitConfig, Simulated: strings.HasPrefix(o.nvml, "sim:"),
		Dynamic: o.partitions == partitionsDynamic, Passthrough: o.passthrough, MPSRoot: o.mpsRoot, MPSUnconfined: !o.mpsSandbox,
	})
}

// hostWarning is what keeps claims from being prepared, or is not as it should be, in a line; empty if nothing is. What concerns the driver
// itself is told with the GPUs, and what is not known is only logged. All that is new is. The hook is nil for one of the host's.
func (o *options) hostWarning(ctx context.Context, hook *cdi.Hook) func() string {
	checker, said, last := o.checker(), map[string]hostcheck.Finding{}, ""
	return func() string {
		var warnings []string
		findings := checker.Run(ctx)
		if ctx.Err() != nil {
			return last // what has not answered was not waited for
		}
		for _, f := range findings {
			if said[f.Check] != f {
				klog.FromContext(ctx).Info("The host", "check", f.Check, "status", f.Status, "found", f.Message, "do", f.Do)
			}
			said[f.Check] = f
			if (f.Status == hostcheck.Missing || f.Status == hostcheck.Warning) && !strings.HasPrefix(f.Check, "driver-") {
				warnings = append(warnings, f.Check+": "+f.Message)
			}
		}
		if hook != nil && hook.Warning() != "" {
			warnings = append(warnings, hook.Warning())
		}
		last = strings.Join(warnings, "; ")
		return last
	}
}

// newCheckCommand returns "check", which needs neither a cluster nor a driver.
func newCheckCommand(opts *options) *cobra.Command {
	output := "table"
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Look whether this node has what the agent needs, and say what to do where it has not",
		Long: `Look whether this node has what the agent needs, and say what to do where it has not.

It changes nothing. Give it the agent's flags where they are not the default, and in a container --host-root. What does not answer within
5 s is unknown.

Exit codes: 0 nothing is to be done; 1 failed; 2 something is missing without which no claim is prepared; 3 there are warnings; 4 something
could not be found out.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return fmt.Errorf("--output %q: want table or json", output)
			}
			if err := opts.validateHardware(); err != nil {
				return err
			}
			findings := opts.checker().Run(cmd.Context())
			if output == "json" {
				encoder := json.NewEncoder(cmd.OutOrStdout())
				encoder.SetIndent("", "  ")
				if err := encoder.Encode(findings); err != nil {
					return err
				}
			} else if err := printFindings(cmd.OutOrStdout(), findings); err != nil {
				return err
			}
			if worst := hostcheck.Worst(findings); worst != hostcheck.OK {
				return &checkError{worst}
			}
			return nil
		},
	}
	opts.addCheckFlags(cmd.Flags())
	cmd.Flags().StringVarP(&output, "output", "o", output, "table or json")
	return cmd
}

// addCheckFlags adds those of run that say where is what is looked at.
func (o *options) addCheckFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.kubeletRoot, "kubelet-root-dir", o.kubeletRoot, "the kubelet's --root-dir")
	flags.StringVar(&o.cdiRoot, "cdi-root", o.cdiRoot, "folder from which the container runtime reads CDI specifications")
	flags.StringVar(&o.hook.path, "nvidia-cdi-hook", o.hook.path,
		"path of the nvidia-cdi-hook program on the host, if the agent is not to bring its own")
	o.host.addFlags(flags)
}

// printFindings has what is to be done below what it is about.
func printFindings(out io.Writer, findings []hostcheck.Finding) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "CHECK\tSTATUS\tFOUND")
	for _, f := range findings {
		fmt.Fprintf(table, "%s\t%s\t%s\n", f.Check, f.Status, f.Message)
		if f.Do != "" {
			fmt.Fprintf(table, "\t\t-> %s\n", f.Do)
		}
	}
	return table.Flush()
}

// checkError tells the worst of the findings, which have been printed.
type checkError struct{ worst hostcheck.Status }

func (e *checkError) Error() string {
	switch e.worst {
	case hostcheck.Missing:
		return "check: something is missing without which no claim is prepared"
	case hostcheck.Warning:
		return "check: there are warnings"
	case hostcheck.OK, hostcheck.Note, hostcheck.Unknown: // the first two are no errors
	}
	return "check: something could not be found out"
}

func (e *checkError) exitCode() int {
	return map[hostcheck.Status]int{hostcheck.Missing: 2, hostcheck.Warning: 3, hostcheck.Unknown: 4}[e.worst]
}
