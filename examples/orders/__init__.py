"""Fulfilling orders: ``app`` is the application, ``demo`` runs it on three pods and kills one."""
