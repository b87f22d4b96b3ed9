// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/draclient"
)

// newProbeCommand returns "probe", which calls the agents of this node as the kubelet does.
func newProbeCommand(opts *options) *cobra.Command {
	timeout := 10 * time.Second
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Ask the agents that serve this node's kubelet who they are, and how their devices are",
		Long: `Ask the agents that serve this node's kubelet who they are, and how their devices are.

It calls over the same sockets, and in the same version, as the kubelet would, and changes nothing. It fails if no agent answers.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !filepath.IsAbs(opts.kubeletRoot) {
				return fmt.Errorf("--kubelet-root-dir %q: an absolute path is needed", opts.kubeletRoot)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return probe(ctx, cmd.OutOrStdout(), filepath.Join(opts.kubeletRoot, "plugins_registry"))
		},
	}
	cmd.Flags().StringVar(&opts.kubeletRoot, "kubelet-root-dir", opts.kubeletRoot, "the kubelet's --root-dir")
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "how long to wait for answers")
	return cmd
}

// probe writes what each plugin in the folder that serves our driver says. The error names those that do not answer.
func probe(ctx context.Context, out io.Writer, registry string) error {
	sockets, err := filepath.Glob(filepath.Join(registry, driver.Name+"*.sock"))
	if err != nil {
		return err
	}
	if len(sockets) == 0 {
		return fmt.Errorf("no plugin of driver %s has a socket in %s", driver.Name, registry)
	}
	var errs []error
	for _, socket := range sockets {
		if err := probeOne(ctx, out, socket); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func probeOne(ctx context.Context, out io.Writer, socket string) (err error) {
	plugin, kind, err := draclient.Ask(ctx, socket)
	if err != nil {
		return err
	}
	if kind != registration.DRAPlugin {
		return fmt.Errorf("the plugin behind %s is of type %q, not %q", socket, kind, registration.DRAPlugin)
	}
	client, err := draclient.New(plugin, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	fmt.Fprintf(out, "registrar  %s\ndriver     %s\nendpoint   %s\nservices   %s\nspoken     %s, %s\n\n",
		socket, plugin.Driver, plugin.Endpoint, strings.Join(plugin.Services, ", "), client.Service(), client.HealthService())
	stream, err := client.WatchHealth(ctx)
	if err != nil {
		return err
	}
	report, err := stream.Recv()
	if err != nil {
		return fmt.Errorf("health of the devices of %s: %w", plugin.Endpoint, err)
	}
	return printHealth(out, report.GetDevices())
}

func printHealth(out io.Writer, devices []*healthv1.DeviceHealth) error {
	slices.SortFunc(devices, func(a, b *healthv1.DeviceHealth) int {
		return strings.Compare(a.GetDevice().GetDeviceName(), b.GetDevice().GetDeviceName())
	})
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "DEVICE\tHEALTH\tMESSAGE")
	for _, device := range devices {
		health := device.GetHealth().String()
		fmt.Fprintf(table, "%s\t%s\t%s\n", device.GetDevice().GetDeviceName(), health[:1]+strings.ToLower(health[1:]), device.GetMessage())
	}
	return table.Flush()
}
