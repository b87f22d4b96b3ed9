// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"

	"k8s.io/apimachinery/pkg/api/resource"
)

// PrintTable writes the GPUs as a table for people, one line each, with those
// that are not offered and why.
func (n *Node) PrintTable(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "driver %s, CUDA %s, %d of %d GPUs offered\n\n",
		n.DriverVersion, n.CUDADriverVersion, n.offered(), len(n.GPUs)+len(n.Failures)); err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	row := func(cells ...any) {
		for i, cell := range cells {
			if i > 0 {
				fmt.Fprint(table, "\t")
			}
			fmt.Fprint(table, cell)
		}
		fmt.Fprintln(table)
	}
	row("DEVICE", "PRODUCT", "MEMORY", "MINOR", "PCIE ROOT", "NUMA", "NVLINK", "UUID", "OFFERED")
	for i := range n.GPUs {
		gpu := &n.GPUs[i]
		row(gpu.Name, orDash(gpu.ProductName), gpu.memory(), gpu.minor(), orDash(gpu.PCIeRoot), gpu.numa(), gpu.nvlink(),
			orDash(gpu.UUID), gpu.offered())
	}
	for _, f := range n.Failures {
		row(f.name(), "-", "-", "-", "-", "-", "-", orDash(f.UUID), "no: "+f.Reason)
	}
	// The table writes to w only here, so this is where its errors are.
	if err := table.Flush(); err != nil {
		return err
	}
	return n.printWarnings(w)
}

func (n *Node) printWarnings(w io.Writer) error {
	for i := range n.GPUs {
		if reason := n.GPUs[i].NoPassthrough; reason != "" {
			if _, err := fmt.Fprintf(w, "%s: not offered to virtual machines: %s\n", n.GPUs[i].Name, reason); err != nil {
				return err
			}
		}
		for _, warning := range n.GPUs[i].Warnings {
			if _, err := fmt.Fprintf(w, "%s: %s\n", n.GPUs[i].Name, warning); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *Node) offered() int {
	count := 0
	for i := range n.GPUs {
		if n.GPUs[i].NotOffered == "" {
			count++
		}
	}
	return count
}

// minor is unknown of a GPU that NVML does not see.
func (g *GPU) minor() string {
	if g.Unseen() {
		return "-"
	}
	return strconv.Itoa(g.Minor)
}

func (g *GPU) memory() string {
	if g.Unseen() {
		return "-"
	}
	return resource.NewQuantity(int64(g.MemoryBytes), resource.BinarySI).String()
}

func (g *GPU) numa() string {
	if g.NUMANode == nil {
		return "-"
	}
	return strconv.Itoa(*g.NUMANode)
}

// nvlink is the links and where they lead: "NV18 nvlink-0000-1b-00-0".
func (g *GPU) nvlink() string {
	if g.NVLink == nil {
		return "-"
	}
	return fmt.Sprintf("NV%d %s", g.NVLink.Links, orDash(g.NVLink.Domain))
}

func (g *GPU) offered() string {
	if g.NotOffered == "" {
		if s := g.Offers[0].Shares; s != nil {
			return s.String()
		}
		return "yes"
	}
	return "no: " + g.NotOffered
}

func (f *Failure) name() string {
	if f.PCIBusID == "" {
		return fmt.Sprintf("(index %d)", f.Index)
	}
	return deviceName(f.PCIBusID)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
