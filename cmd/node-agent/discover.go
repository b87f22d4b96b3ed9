// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
)

// newDiscoverCommand returns "discover", which needs no cluster.
func newDiscoverCommand(opts *options) *cobra.Command {
	output := "table"
	cmd := &cobra.Command{
		Use:   "discover",
		Short: "Print the GPUs of this machine, as they would be published",
		Example: `  node-agent discover
  node-agent discover -o yaml --nvml=sim:dgx-h100 --node-name=node-1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if output != "table" && output != "yaml" && output != "json" {
				return fmt.Errorf("--output %q: want table, yaml or json", output)
			}
			if err := opts.validateHardware(); err != nil {
				return err
			}
			handle, err := opts.open()
			if err != nil {
				return err
			}
			if err := handle.Init(); err != nil {
				return fmt.Errorf("--nvml %s: %w", opts.nvml, err)
			}
			defer func() { err = errors.Join(err, handle.Shutdown()) }()
			node, err := discovery.Discover(cmd.Context(), handle, handle.Sysfs)
			if err != nil {
				return fmt.Errorf("discover GPUs: %w", err)
			}
			shares, err := opts.shares()
			if err != nil {
				return err
			}
			sharing, err := opts.sharing()
			if err != nil {
				return err
			}
			node.Offer(discovery.Policy{
				Dynamic: opts.partitions == partitionsDynamic, Shares: shares,
				Sharing: opts.onHost(cmd.Context(), sharing, handle.Simulated), Passthrough: opts.passthrough,
			})
			if unknown := shares.Unknown(node); len(unknown) > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "--share-gpus: this machine has no GPU %s\n", strings.Join(unknown, ", "))
			}
			switch output {
			case "table":
				return node.PrintTable(cmd.OutOrStdout())
			case "json":
				return json.NewEncoder(cmd.OutOrStdout()).Encode(node)
			default:
				return printSlices(cmd.OutOrStdout(), opts.nodeName, node)
			}
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", output, "table, yaml (the ResourceSlices) or json (all that was found)")
	return cmd
}

// printSlices writes the ResourceSlices as a stream of YAML documents. Names and generations are given by the API
// server when they are published.
func printSlices(w io.Writer, nodeName string, node *discovery.Node) error {
	for poolName, pool := range node.DriverResources(nodeName).Pools {
		for _, slice := range pool.Slices {
			document, err := yaml.Marshal(&resourceapi.ResourceSlice{
				TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
				ObjectMeta: metav1.ObjectMeta{GenerateName: nodeName + "-" + driver.Name + "-"},
				Spec: resourceapi.ResourceSliceSpec{
					Driver:         driver.Name,
					NodeName:       &nodeName,
					Pool:           resourceapi.ResourcePool{Name: poolName, ResourceSliceCount: int64(len(pool.Slices))},
					Devices:        slice.Devices,
					SharedCounters: slice.SharedCounters,
				},
			})
			if err != nil {
				return fmt.Errorf("write ResourceSlice: %w", err)
			}
			if _, err := fmt.Fprintf(w, "---\n%s", document); err != nil {
				return err
			}
		}
	}
	return nil
}
